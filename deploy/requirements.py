"""`python requirements.py PYPROJECT EXTRA...`: the requirements of OpenGyre and of these extras, one a line.

For the image: what we stand on is installed before our own code is there, so a change of the code keeps those layers.
"""

import sys
import tomllib
from pathlib import Path


def main() -> None:
    project = tomllib.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["project"]
    lines = list(project["dependencies"])
    for extra in sys.argv[2:]:
        lines += project["optional-dependencies"][extra]
    print("\n".join(line for line in dict.fromkeys(lines) if not line.startswith(f"{project['name']}[")))


if __name__ == "__main__":
    main()
