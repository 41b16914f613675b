"""The page of symptoms and the table of health checks are the same list, and the options that they name exist."""

from __future__ import annotations

import re
from dataclasses import fields
from functools import cache

import pytest
from doc_blocks import ROOT

from agile_trainers.evaluation.diagnosis import HEALTH_CHECKS, METRICS
from agile_trainers.trainers import MultiTurnGRPOConfig, MultiTurnPPOConfig

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
*SYMPTOMS, _ = PAGE.split("\n## ")[1:]  # the last section has the conditions
SECTIONS = {text.split("\n", 1)[0]: text for text in SYMPTOMS}
OTHERS = {"max_position_embeddings", "train_dataset", "decision_truncate", "grad_norm"}
"""Of the model's configuration, an argument of trainers, a value of an option, and a metric of `Trainer`."""
WORDS = {"demonstrations", "seed"}
"""Options that are words of an advice in another sense."""
OPTIONS = {field.name for config in (MultiTurnGRPOConfig, MultiTurnPPOConfig) for field in fields(config)}


@cache
def logged_names() -> str:
    """Pages that describe the metrics."""
    pages = ("grpo.md", "ppo.md", "cispo.md", "troubleshooting.md")
    return "\n".join((ROOT / "docs" / page).read_text(encoding="utf-8") for page in pages)


def test_every_finding_has_a_section_and_every_section_a_finding() -> None:
    assert [*SECTIONS] == [check.name for check in HEALTH_CHECKS]
    assert {*re.findall(r"\[(\w+)\]\(#\1\)", PAGE.partition("\n## ")[0])} == SECTIONS.keys(), "each has a symptom"


@pytest.mark.parametrize("check", HEALTH_CHECKS, ids=lambda check: check.name)
def test_a_section_says_symptom_cause_and_fix_with_the_options_of_the_advice(check) -> None:
    section = SECTIONS[check.name]
    assert [section.count(f"**{part}.**") for part in ("Symptom", "Cause", "Fix")] == [1, 1, 1]
    fix = section.partition("**Fix.**")[2]
    words = re.findall(r"\b[a-z]+(?:_[a-z]+)*\b", check.advice)
    for name in OPTIONS.intersection(words) - WORDS:
        assert f"`{name}`" in fix, name
    assert {word for word in words if "_" in word} <= OPTIONS | OTHERS, "every option of the advice exists"
    assert {*check.unless} <= SECTIONS.keys()


def test_an_option_that_the_page_names_exists() -> None:
    findings = {*SECTIONS}
    metrics = {name for metric in METRICS for name in (metric, metric.split("/")[0])}
    for name in set(re.findall(r"`([a-z]+(?:_[a-z]+)+)`", PAGE)) - findings - metrics - OTHERS:
        assert name in OPTIONS, name


@pytest.mark.parametrize("metric", sorted(METRICS))
def test_every_metric_of_a_condition_is_described(metric: str) -> None:
    family, _, name = metric.rpartition("/")
    text = logged_names()
    described = (f"`{metric}`", f"`{family}/<", f"`{family}/*`", f"`{name}`") if family else (f"`{metric}`",)
    assert any(form in text for form in described)
