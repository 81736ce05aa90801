"""Each of the fifty hostile programs is a test: here, or where the part it attacks is tested."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
ELSEWHERE = {
    8: "unit/tools/test_collector.py::test_a_sparse_tebibyte_is_refused_at_once",
    26: "unit/tools/test_collector.py::test_links_out_of_the_workspace_are_refused",
    27: "unit/tools/test_collector.py::test_hard_links_are_refused_under_each_name",
    28: "unit/tools/test_collector.py::test_a_thread_that_swaps_file_and_link_gets_nothing_out",
    29: "unit/tools/test_collector.py::test_pipes_sockets_and_devices_are_refused_without_blocking",
    42: "unit/tools/test_collector.py::test_a_listing_is_not_what_a_program_prints",
    43: "unit/tasks/test_csv_file.py::test_a_fault_has_its_type",
    49: "unit/tools/test_code_blocks.py::test_what_counts_as_a_block",
}


def test_all_fifty_are_there():
    here = set()
    for path in Path(__file__).parent.glob("test_*.py"):
        text = path.read_text()
        for numbers in re.findall(r"def test((?:_\d\d)+)_", text) + re.findall(r'id="(\d\d)-', text):
            here |= {int(number) for number in re.findall(r"\d\d", numbers)}
    assert here | set(ELSEWHERE) == set(range(1, 51))


def test_those_elsewhere_exist():
    for name in ELSEWHERE.values():
        path, test = name.split("::")
        assert f"def {test}(" in (TESTS / path).read_text(), name
