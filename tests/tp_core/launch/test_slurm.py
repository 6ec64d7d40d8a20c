"""Slurm's short forms are written out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tp_core._launch._environment import derive_port, expand_counts, expand_hosts
from tp_core.errors import LaunchEnvironmentError


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1", ["node1"]),
        ("node[001-004,7],gpu1", ["node001", "node002", "node003", "node004", "node7", "gpu1"]),
        ("a,b", ["a", "b"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("n[1-2].cluster,x-y", ["n1.cluster", "n2.cluster", "x-y"]),
        ("0[08-10]", ["008", "009", "010"]),
    ],
)
def test_host_lists_are_written_out(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize("text", ["", "n[1", "n]", "n[2-1]", "n[]", "n[a-b]", "a,,b", "n[[1]]"])
def test_a_malformed_host_list_is_refused(text: str) -> None:
    with pytest.raises(LaunchEnvironmentError, match=r"is not a list of hosts; it should look like"):
        expand_hosts(text)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=6))
def test_counts_are_written_out(counts: list[int]) -> None:
    assert expand_counts(",".join(map(str, counts))) == counts
    assert expand_counts(",".join(f"{n}(x{n})" for n in counts)) == [n for n in counts for _ in range(n)]


@pytest.mark.parametrize("text", ["", "2(x)", "x3", "2(3)", "1,"])
def test_a_malformed_count_is_refused(text: str) -> None:
    with pytest.raises(LaunchEnvironmentError, match=r"is not a list of tasks per node; it should"):
        expand_counts(text)


@given(st.integers(0, 10**9), st.integers(0, 10**4))
def test_a_derived_port_is_neither_privileged_nor_ephemeral(job: int, step: int) -> None:
    assert 1024 < derive_port(job, step) < 32_768
    assert derive_port(job, step) != derive_port(job, step + 1)
    assert derive_port(job, step) != derive_port(job + 1, step)
