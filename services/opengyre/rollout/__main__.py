"""`python -m opengyre.rollout`: run the rollout service."""

from opengyre.shared.lifecycle import main

if __name__ == "__main__":
    main("rollout", "opengyre.rollout.service:Rollout")
