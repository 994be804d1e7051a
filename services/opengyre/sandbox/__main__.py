"""`python -m opengyre.sandbox`: the sandbox service of one node."""

from opengyre.shared.lifecycle import main

if __name__ == "__main__":
    main("sandbox", "opengyre.sandbox.service:SandboxService")
