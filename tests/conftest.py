"""Small models, so compile fast rather than well."""

import jax
import pytest

jax.config.update('jax_disable_most_optimizations', True)


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield
