"""Answers on disk: what is written is read, by one process or several, and a half line costs its row alone."""

import json

import pytest

from normalign.evaluation.sample_store import SampleStore


def test_answers_of_all_processes_are_read_and_the_last_one_counts(tmp_path):
    first, second = (SampleStore(tmp_path, "pope", rank, 2) for rank in (0, 1))
    first.append([{"id": "0", "answer": "no"}, {"id": "2", "error": "out of memory"}])
    second.append([{"id": "1", "answer": "yes"}])
    first.append([{"id": "2", "answer": "yes"}])
    for store in (first, second, SampleStore(tmp_path, "pope")):
        assert {row_id: row.get("answer") for row_id, row in store.read().items()} == {
            "0": "no",
            "1": "yes",
            "2": "yes",
        }
        assert "error" not in store.read()["2"]
    assert SampleStore(tmp_path, "mmstar").read() == {}


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_line_cut_by_a_kill_is_asked_again_and_harms_no_other(tmp_path, cut):
    store = SampleStore(tmp_path, "pope")
    store.append([{"id": "0", "answer": "no"}, {"id": "1", "answer": "yes, there is"}])
    store.path.write_bytes(store.path.read_bytes()[:-cut])
    assert set(store.read()) == ({"0", "1"} if cut == 1 else {"0"})
    store.append([{"id": "2", "answer": "maybe"}])
    assert {"0", "2"} <= set(store.read()) and store.read()["2"]["answer"] == "maybe"


def test_text_with_line_separators_and_quotes_comes_back(tmp_path):
    store = SampleStore(tmp_path, "own")
    answer = 'a\u2028b\u0085c\n"d" \\ \ud83d\ude00'.encode("utf-16", "surrogatepass").decode("utf-16")
    store.append([{"id": "ä", "answer": answer}])
    assert store.read()["ä"]["answer"] == answer
    store.finish(store.read().values())
    assert store.read()["ä"]["answer"] == answer


def test_finished_answers_are_one_file_and_further_ones_go_beside_it(tmp_path):
    store = SampleStore(tmp_path, "pope")
    store.append([{"id": "1", "answer": "yes"}])
    store.finish([{"id": "1", "answer": "yes", "score": 1.0}])
    assert [path.name for path in tmp_path.iterdir()] == ["pope.jsonl"]
    assert json.loads((tmp_path / "pope.jsonl").read_text()) == {"id": "1", "answer": "yes", "score": 1.0}
    store.append([{"id": "2", "answer": "no"}])
    assert set(store.read()) == {"1", "2"}
