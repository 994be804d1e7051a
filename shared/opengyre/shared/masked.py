"""Addresses as they may be shown."""

import re


def masked(text: str) -> str:
    """`text` with a mask for whatever stands before an @ in an address: users, passwords, tokens."""
    return re.sub(r"//[^/@\s\"]+@", "//**********@", text)
