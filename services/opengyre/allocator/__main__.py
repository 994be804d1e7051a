"""`python -m opengyre.allocator`."""

from opengyre.shared.lifecycle import main

if __name__ == "__main__":
    main("allocator", "opengyre.allocator.service:Allocator")
