"""Small models, so compile fast rather than well, and never the same thing twice."""

from pathlib import Path

import jax
import pytest

jax.config.update('jax_disable_most_optimizations', True)
jax.config.update(
    'jax_compilation_cache_dir', str(Path(__file__).parent.parent / '.cache' / 'xla')
)
jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)
jax.config.update('jax_persistent_cache_min_entry_size_bytes', -1)


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield
