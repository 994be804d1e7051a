"""`gyre hosts`: a row a host."""

import io

from rich.console import Console

from opengyre.cli.hosts import table

HOST = {
    "host": "host0", "cell": "host0", "state": "rollout", "version": 3, "running": 0, "capacity": 32.0,
    "tokens_per_s": 0.0, "since_s": 1.0,
}  # fmt: skip


def shown(**changed: object) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=200).print(table({"hosts": [HOST | changed], "cells": []}))
    return out.getvalue().splitlines()[-2].split()


def test_calls_are_counted_in_whole_numbers() -> None:
    """They were "0/32.0"."""
    assert "0/32" in shown()
    assert "3/2.5" in shown(running=3, capacity=2.5)
    assert "3/10000" in shown(running=3, capacity=10_000.0)
