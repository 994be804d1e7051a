"""`python -m opengyre.cli` is `gyre`."""

import sys


def main() -> None:
    # Modules load for most of a second; an interruption within it is as clean as any later.
    try:
        from opengyre.cli.main import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
