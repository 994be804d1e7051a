"""`python -m opengyre.gateway`."""

from opengyre.shared.lifecycle import main

if __name__ == "__main__":
    main("gateway", "opengyre.gateway.service:Gateway")
