"""`python -m opengyre.trainer`: run the trainer."""

from opengyre.shared.lifecycle import main

if __name__ == "__main__":
    main("trainer", "opengyre.trainer.service:Trainer")
