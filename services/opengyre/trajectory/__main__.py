"""`python -m opengyre.trajectory`: run the trajectory service."""

from opengyre.shared.lifecycle import main

if __name__ == "__main__":
    main("trajectory", "opengyre.trajectory.service:Trajectory")
