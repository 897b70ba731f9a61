"""What the tests of this room have in common: the mini model as a folder."""

import pytest


@pytest.fixture(scope="session")
def folder(composed, tmp_path_factory):
    """The mini model and its processor, saved; not to be changed."""
    folder = tmp_path_factory.mktemp("composed")
    for part in composed:
        part.save_pretrained(folder)
    return folder
