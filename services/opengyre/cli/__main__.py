"""`python -m opengyre.cli` is `gyre`."""

from opengyre.cli.main import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
