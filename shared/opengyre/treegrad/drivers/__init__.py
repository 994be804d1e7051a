"""Adapters that run one chunk of a model, one a family; `driver_for` finds the one of a model by its config."""

from opengyre.treegrad.drivers.base import Driver, UndrivableModelError
from opengyre.treegrad.drivers.find import driver_for

__all__ = ["Driver", "UndrivableModelError", "driver_for"]
