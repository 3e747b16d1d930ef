"""The journal of a run: what was paid for is never asked again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import dspy
import pytest

from amem_dspy.adapter import Scope, extraction_scope
from amem_dspy.errors import BudgetSpentError, ConfigError, DataError
from amem_dspy.optimize.account import Account, accounted, fresh_cache
from amem_dspy.optimize.journal import Journal
from amem_dspy.optimize.run_folder import run_folder
from amem_dspy.signatures import RewriteQuery
from amem_dspy.usage import BudgetMeter, Meter, Price, StepUsage

Numbered = Callable[..., Any]


@pytest.fixture
def numbered(make_lm: Any) -> Numbered:
    """A model whose replies say how many it has given, over a journal; with its engine."""

    def make(path: Path | None, meter: Meter | None = None, **settings: Any) -> tuple[Any, Any]:
        count = 0

        def reply(step: str, prompt: str) -> Any:
            nonlocal count
            count += 1
            return {"keywords": [f"reply {count}"]}

        lm, engine = make_lm(reply, **settings)
        journal = Journal(path) if path else None
        return accounted(lm, Account(meter or Meter(), "besides", journal=journal)), engine

    return make


def ask(lm: Any, question: str = "q", meter: Meter | None = None, **settings: Any) -> list[str]:
    with dspy.context(lm=lm), extraction_scope(Scope(step="rewrite", meter=meter)):
        made = dspy.Predict(RewriteQuery)(question=question, config=settings)
    return list(made.keywords)


def test_a_run_started_again_gets_the_same_replies_and_asks_no_model(
    numbered: Numbered, tmp_path: Path
) -> None:
    path = tmp_path / "journal.jsonl"
    first, engine = numbered(path)
    said = [ask(first, question) for question in ("a", "b", "a")]
    again, idle = numbered(path)
    assert [ask(again, question) for question in ("a", "b", "a")] == said
    assert (len(engine.requests), len(idle.requests)) == (3, 0)
    assert ask(again, "c") == ["reply 1"]


def test_the_same_request_sampled_again_has_its_replies_in_order(
    numbered: Numbered, tmp_path: Path
) -> None:
    path = tmp_path / "journal.jsonl"
    first, _ = numbered(path, temperature=1.0, cache=True)
    said = [ask(first, rollout_id=number) for number in (1, 2, 1)]
    assert said == [["reply 1"], ["reply 2"], ["reply 1"]]
    uncached = first.copy(cache=False)
    said += [ask(uncached, rollout_id=number) for number in (1, 1)]
    assert said[3:] == [["reply 3"], ["reply 4"]]
    with fresh_cache():
        again, idle = numbered(path, temperature=1.0, cache=True)
        assert [ask(again, rollout_id=number) for number in (1, 2, 1)] == said[:3]
        uncached = again.copy(cache=False)
        assert [ask(uncached, rollout_id=number) for number in (1, 1)] == said[3:]
    assert idle.requests == []


def test_replies_of_the_journal_count_against_the_budget_as_when_they_were_paid(
    numbered: Numbered, tmp_path: Path
) -> None:
    path = tmp_path / "journal.jsonl"
    meters = [BudgetMeter(max_calls=2), BudgetMeter(max_calls=2)]
    for meter in meters:
        lm, _ = numbered(path)
        ask(lm, "a", meter)
        ask(lm, "b", meter)
        with pytest.raises(BudgetSpentError):
            ask(lm, "c", meter)
    assert meters[0].steps() == meters[1].steps()
    assert meters[0].total().prompt_tokens == 20


def test_calls_besides_the_steps_are_counted_and_refused_too(numbered: Numbered) -> None:
    meter = BudgetMeter(max_calls=1)
    lm, engine = numbered(None, meter)
    lm("Propose an instruction.")
    assert meter.steps() == {"besides": StepUsage(calls=1, prompt_tokens=10, completion_tokens=3)}
    with pytest.raises(BudgetSpentError):
        lm.copy(temperature=1.0)("Another.")
    assert len(engine.requests) == 1


def test_text_calls_of_optimisers_are_kept_too(numbered: Numbered, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    said = numbered(path)[0]("Reflect.")
    again, idle = numbered(path)
    assert again("Reflect.") == said
    assert idle.requests == []


async def test_awaited_calls_share_the_journal(numbered: Numbered, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    said = numbered(path)[0]("Reflect.")
    again, idle = numbered(path)
    assert await again.acall("Reflect.") == said
    assert await again.acall("More.") == ['{"keywords": ["reply 1"]}']
    assert (len(idle.requests), len(Journal(path))) == (1, 2)


def test_a_price_given_is_what_every_call_costs(make_lm: Any) -> None:
    meter = Meter()
    account = Account(meter, "besides", price=Price(1_000_000, 2_000_000))
    lm = accounted(make_lm([{"keywords": ["a"]}], cache=True)[0], account)
    lm("Propose.")
    ask(lm, "a", meter)
    ask(lm, "a", meter)
    steps = meter.steps()
    assert (steps["besides"].cost, steps["rewrite"].cost) == (16.0, 16.0)
    assert (steps["rewrite"].calls, steps["rewrite"].cached) == (1, 1)


@pytest.mark.parametrize(("listed", "cost"), [(False, 16.0), (True, 3.3e-06)])
def test_what_dspy_knows_of_a_price_goes_first_where_it_is_said(
    chat_server: Any, listed: bool, cost: float
) -> None:
    status, headers, body = chat_server.reply({"keywords": ["a"]})
    chat_server.answers = [(status, headers, {**body, "model": "gpt-4o-mini"})]
    lm = dspy.LM("openai/gpt-4o-mini", api_key="none", api_base=chat_server.url, cache=False)
    meter = Meter()
    account = Account(meter, "besides", price=Price(1_000_000, 2_000_000), listed=listed)
    ask(accounted(lm, account), meter=meter)
    assert meter.total().cost == pytest.approx(cost)


def test_an_engine_that_samples_by_sendings_is_told_of_replies_it_need_not_give(
    numbered: Numbered, tmp_path: Path
) -> None:
    path = tmp_path / "journal.jsonl"
    ask(numbered(path)[0])
    again, engine = numbered(path)
    skipped: list[Any] = []
    engine.skip = skipped.append
    ask(again)
    ask(again)
    assert [request.messages for request in skipped] == [engine.requests[0].messages]


def test_half_a_line_of_a_killed_process_is_dropped(numbered: Numbered, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    lm, _ = numbered(path)
    ask(lm, "a")
    whole = path.read_bytes()
    ask(lm, "b")
    path.write_bytes(path.read_bytes()[:-20])
    again, engine = numbered(path)
    assert (ask(again, "a"), ask(again, "b")) == (["reply 1"], ["reply 1"])
    assert len(engine.requests) == 1
    assert path.read_bytes().startswith(whole)
    assert len(Journal(path)) == 2


def test_a_line_that_was_changed_is_an_error_that_names_it(
    numbered: Numbered, tmp_path: Path
) -> None:
    path = tmp_path / "journal.jsonl"
    ask(numbered(path)[0])
    path.write_bytes(b"{}\n" + path.read_bytes())
    with pytest.raises(DataError, match="line 1"):
        Journal(path)


def test_threads_lose_no_reply(numbered: Numbered, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    lm, _ = numbered(path)
    with ThreadPoolExecutor(8) as pool:
        said = list(pool.map(lambda number: lm(f"text {number % 20}"), range(60)))
    assert len(Journal(path)) == 60
    again, idle = numbered(path)
    repeated = [again(f"text {number % 20}") for number in range(60)]
    assert sorted(map(str, repeated)) == sorted(map(str, said))
    assert idle.requests == []


def test_no_key_and_no_prompt_is_in_the_journal(chat_server: Any, tmp_path: Path) -> None:
    key = "not-a-real-key-" + "1234"
    status, headers, body = chat_server.reply({"keywords": ["a"]})
    chat_server.answers = [(status, headers, {**body, "system_fingerprint": key})]
    lm = dspy.LM(
        "openai/m",
        api_key=key,
        api_base=chat_server.url,
        cache=False,
    )
    path = tmp_path / "journal.jsonl"
    kept = accounted(lm, Account(Meter(), "besides", journal=Journal(path)))
    assert ask(kept, "a private question") == ["a"]
    text = path.read_text(encoding="utf-8")
    assert key not in text and "private" not in text
    other = lm.copy(api_key="another", api_base="http://127.0.0.1:9/v1")
    again = accounted(other, Account(Meter(), "besides", journal=Journal(path)))
    assert ask(again, "a private question") == ["a"]


def test_what_calls_took_is_known_from_the_journal(numbered: Numbered, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    assert Journal(path).rate() is None
    lm, _ = numbered(path)
    ask(lm, "a")
    ask(lm, "b")
    rate = Journal(path).rate()
    assert rate is not None
    assert (rate.calls, rate.prompt_tokens, rate.completion_tokens) == (2, 20, 6)
    assert rate.seconds_a_call == rate.seconds / 2


def test_a_copied_program_keeps_the_model_and_its_journal(
    numbered: Numbered, tmp_path: Path
) -> None:
    lm, _ = numbered(tmp_path / "journal.jsonl")
    predictor = dspy.Predict(RewriteQuery)
    predictor.lm = lm
    copied = copy.deepcopy(predictor)
    assert copied.lm.account.journal is lm.account.journal


SETTINGS = {"seed": 1, "model": {"name": "a", "temperature": 0.0}, "split": {"dev": ["c-1"]}}


def test_a_folder_is_opened_again_with_the_same_settings_alone(tmp_path: Path) -> None:
    for _ in range(2):
        with run_folder(tmp_path / "run", SETTINGS) as opened:
            opened.builds.mkdir()
    other = {**SETTINGS, "seed": 2, "model": {"name": "b"}}
    with (
        pytest.raises(ConfigError, match=r"model\.name: \"a\" there, \"b\" now.*seed: 1 there, 2"),
        run_folder(tmp_path / "run", other),
    ):
        pass


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    with (
        run_folder(tmp_path / "run", SETTINGS),
        pytest.raises(ConfigError, match="another run is at work"),
        run_folder(tmp_path / "run", SETTINGS),
    ):
        pass


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("words", encoding="utf-8")
    with (
        pytest.raises(ConfigError, match=r"thesis\.txt"),
        run_folder(tmp_path, SETTINGS),
    ):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_manifest_that_is_no_json_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{", encoding="utf-8")
    with pytest.raises(DataError, match=r"manifest\.json"), run_folder(tmp_path, SETTINGS):
        pass
