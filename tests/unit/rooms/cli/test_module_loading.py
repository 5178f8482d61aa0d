"""Test that collections pause while modules are loaded, and not afterwards."""

import gc

import pytest

from rooms.cli.module_loading import module_loading


def test_collections_pause_and_loaded_objects_are_not_scanned_again() -> None:
    try:
        with module_loading():
            assert not gc.isenabled()
            loaded: list[object] = []
        assert gc.isenabled()
        assert all(one is not loaded for one in gc.get_objects())
    finally:
        gc.unfreeze()


def test_a_module_that_fails_leaves_the_collector_on() -> None:
    try:
        with pytest.raises(ImportError), module_loading():
            raise ImportError("a module is missing")
        assert gc.isenabled()
    finally:
        gc.unfreeze()
