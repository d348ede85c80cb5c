"""What is told of a runtime env that Ray could not build."""

from __future__ import annotations

from holdfast.orchestrator.backends.ray import runtime_env

SAID = """Could not create the actor because its associated runtime env failed to be created.
[Node 10.0.0.7] Traceback (most recent call last):
  File "ray/runtime_env/packaging.py", line 957, in download
    raise IOError(
OSError: Failed to download gcs://package.zip
Try again.
"""


def test_where_in_ray_it_happened_is_not_told() -> None:
    assert runtime_env.words(SAID).splitlines()[1:] == [
        "[Node 10.0.0.7] OSError: Failed to download gcs://package.zip", "Try again.",
    ]  # fmt: skip


def test_the_short_form_is_one_line_without_what_all_of_them_say() -> None:
    assert runtime_env.short(f"Failed to set up runtime environment.\n{SAID}") == (
        "[Node 10.0.0.7] OSError: Failed to download gcs://package.zip Try again."
    )


def test_of_a_long_one_both_ends_are_told() -> None:
    told = runtime_env.short(f"wanted numpy==0\n{'resolving ' * 100}\nERROR: no such version")
    assert told.startswith("wanted numpy==0 resolving") and told.endswith("ERROR: no such version")
    assert len(told) == 2 * runtime_env.SHORT + len(" ... ")
