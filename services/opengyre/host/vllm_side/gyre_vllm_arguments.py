"""Says what arguments of vLLM's server set, by its own parser, and starts nothing. Runs in vLLM's own environment.

On stdout a JSON list: the names that the parser gives to what is set. Arguments that it refuses end it as they end the
server: with its usage and a last line that says why, and a status that is not 0.
"""

import argparse
import json
import sys


def main() -> None:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser(prog="vllm"))
    validate_parsed_serve_args(parser.parse_args())
    # What is set to its default is set as well.
    for action in parser._actions:  # noqa: SLF001 - there is no other list of them
        action.default = argparse.SUPPRESS
    print(json.dumps(sorted(vars(parser.parse_args()))))


if __name__ == "__main__":
    sys.exit(main())
