"""`python -m opengyre.host`."""

from opengyre.shared.lifecycle import main

if __name__ == "__main__":
    main("host", "opengyre.host.many:serve")
