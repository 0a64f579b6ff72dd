"""The page as a visitor meets it: documents, answers, the strip, the store, live numbers, key,
keyboard, themes.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import BrowserContext, Page, expect

from tests.kits.page import (
    CONTRASTS,
    QUESTION,
    UNNAMED,
    add_example,
    add_file,
    answered,
    asked,
    opened,
    overflow,
)
from tests.promises.browser.conftest import KEY

WIDTHS = {"phone": 390, "tablet": 820, "wide": 1300}


def test_the_whole_way_from_a_document_to_the_tokens_of_its_answer(
    page: Page, address: str
) -> None:
    opened(page, address)
    add_example(page)
    turn = asked(page)
    for side in ("ragfuse", "Full prefill"):
        expect(turn.get_by_label(side, exact=True).locator(".answer")).to_contain_text("Bo")
        expect(turn.get_by_label(side, exact=True).locator(".clock")).to_have_text(
            re.compile(r"^\d+\.\d+\ss$")
        )
    expect(turn.locator(".verdict")).to_contain_text(re.compile(r"First token \d+\.\dx faster"))
    expect(turn.locator(".verdict")).to_contain_text("6 of 6 passages")
    n_cells = turn.locator(".strip .cell").count()
    assert turn.locator(".strip-box h3").inner_text() == f"The prompt, {n_cells} tokens"
    told = turn.locator(".legend").inner_text()
    counts = {
        name: int(n) for name, n in re.findall(r"\b(reused|recomputed|computed|prefix) (\d+)", told)
    }
    assert sum(counts.values()) == n_cells
    assert counts["reused"] > counts["recomputed"] > 0
    for letter, name in zip("rcfp", ("reused", "recomputed", "computed", "prefix"), strict=True):
        assert turn.locator(f".strip .cell.{letter}").count() == counts[name]

    turn.locator(".segment.chunk").first.click()
    detail = turn.locator(".detail")
    for word in ("source", "memory", "raw", "after filler text", "exact"):
        expect(detail).to_contain_text(word)
    turn.get_by_text("The plan in words").click()
    expect(turn.locator("pre").first).to_contain_text("6 segments from the store")


def test_another_ratio_and_another_policy_ask_again(page: Page, address: str) -> None:
    opened(page, address)
    add_example(page)
    turn = asked(page)
    ratio = turn.get_by_role("slider", name="Recomputed")
    ratio.fill("0")
    answered(page)
    expect(turn.locator(".again output")).to_have_text("0% of chunk tokens, plain reuse")
    assert turn.locator(".strip .cell.c").count() == 0
    ratio.fill("0.5")
    answered(page)
    half = turn.locator(".strip .cell.c").count()
    assert half > 50
    for policy in ("query", "lexical", "hkvd", "lego"):
        turn.get_by_label("Policy").select_option(policy)
        answered(page)
        expect(turn.locator(".verdict")).to_contain_text(f"recomputed by {policy}")
    turn.get_by_label("Policy").select_option("")
    answered(page)
    turn.get_by_role("button", name="Let the policy choose").click()
    answered(page)
    assert 0 < turn.locator(".strip .cell.c").count() < half


def test_a_conversation_goes_on_with_what_was_said(page: Page, address: str) -> None:
    opened(page, address)
    add_example(page)
    asked(page)
    turn = asked(page, "And what else did he take with him?")
    assert page.locator(".turn").count() == 2
    assert turn.locator(".segment.chunk").count() >= 5  # the first one may be part of the prefix
    assert turn.locator(".strip .cell.r, .strip .cell.p").count() > 500
    turn.get_by_text("The same as curl").click()
    sent = turn.locator(".codes pre").inner_text()
    assert QUESTION in sent
    assert '"role": "assistant"' in sent
    passages = re.findall(r'"type": "text-plain",\s*"text": "((?:[^"\\]|\\.)*)"', sent)
    assert len(passages) == len(set(passages)) >= 6, "a passage stands twice"
    page.get_by_role("button", name="New conversation").click()
    assert page.locator(".turn").count() == 0


def test_the_same_question_gives_the_same_answer_by_other_programs(
    page: Page, address: str
) -> None:
    opened(page, address)
    add_example(page)
    turn = asked(page)
    answer = turn.get_by_label("ragfuse", exact=True).locator(".answer").inner_text()
    turn.get_by_text("The same as curl").click()
    for program, command in (
        ("curl", ["bash", "-c"]),
        ("LangChain", [sys.executable, "-c"]),
        ("LlamaIndex", [sys.executable, "-c"]),
    ):
        turn.get_by_role("tab", name=program).click()
        code = turn.locator(".codes pre").inner_text()
        done = subprocess.run(
            [*command, code], capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, f"{program}: {done.stderr[-2000:]}"
        assert answer in done.stdout


def test_a_pdf_and_several_files_can_be_chosen_and_left_out_of_the_search(
    page: Page, address: str, tmp_path: Path
) -> None:
    from tests.kits.pdf import pdf

    opened(page, address)
    paper, note = tmp_path / "storm.pdf", tmp_path / "note.md"
    paper.write_bytes(pdf("The harbour master of Vessby is called Agnes Rydberg."))
    note.write_text(
        "The ferry to Vessby is painted yellow, and its captain is Nils Berg.", encoding="utf-8"
    )
    add_file(page, paper)
    add_file(page, note)
    for each in page.locator("#documents li", has_not_text="storm.pdf").all():
        each.get_by_role("checkbox").uncheck()
    turn = asked(page, "Who is the harbour master of Vessby?")
    expect(turn.get_by_label("ragfuse", exact=True).locator(".answer")).to_contain_text(
        "Agnes Rydberg"
    )
    expect(turn.locator(".segment.chunk")).to_have_attribute("title", re.compile(r"^storm\.pdf #1"))
    for name in ("storm.pdf", "note.md"):
        page.get_by_role("button", name=f"Delete {name}").click()
        expect(page.locator("#documents li", has_text=name)).to_have_count(0)


def test_a_document_that_cannot_be_read_says_why(page: Page, address: str, tmp_path: Path) -> None:
    opened(page, address)
    for name, data, told in (
        ("empty.txt", b"  ", "has no text"),
        ("no.pdf", b"hello", "cannot be read"),
    ):
        (tmp_path / name).write_bytes(data)
        page.locator("#files").set_input_files(tmp_path / name)
        expect(page.locator("#documents li", has_text=name)).to_contain_text(told)
        page.get_by_role("button", name=f"Delete {name}").click()
    (tmp_path / "picture.txt").write_bytes(b"\x00\x01")
    page.locator("#files").set_input_files(tmp_path / "picture.txt")
    expect(page.locator("#document-error")).to_contain_text(
        re.compile("^picture.txt: .*is not text")
    )


def test_markup_in_names_documents_questions_and_answers_stays_text(
    page: Page, address: str, tmp_path: Path
) -> None:
    page.add_init_script("window.broken = []; window.alert = (what) => window.broken.push(what);")
    opened(page, address)
    evil = '<img src=x onerror="alert(1)"><script>alert(2)</script><svg onload=alert(3)>'
    file = tmp_path / "<img src=x onerror=alert(4)>.txt"
    file.write_text(
        f"The password of the {evil} gate is {evil}. </p></pre></textarea>{evil}\n",
        encoding="utf-8",
    )
    add_file(page, file)
    for each in page.locator("#documents li", has_not_text="onerror").all():
        each.get_by_role("checkbox").uncheck()
    turn = asked(page, f"What is the password? {evil}")
    turn.locator(".segment.chunk").first.click()
    expect(turn.locator(".detail")).to_contain_text("<script>alert(2)</script>")
    turn.get_by_text("The plan in words").click()
    turn.get_by_text("The same as curl").click()
    page.get_by_role("tab", name="Store").click()
    expect(page.get_by_role("region", name="Bytes by source", exact=True)).to_contain_text(
        "<img src=x onerror=alert(4)>"
    )
    assert page.locator("main img, main svg, main script").count() == 0
    assert page.evaluate("window.broken") == []
    page.get_by_role("tab", name="Try").click()
    page.get_by_role("button", name=f"Delete {file.name}").click()


def test_the_store_is_shown_and_deleted(page: Page, address: str, tmp_path: Path) -> None:
    opened(page, address)
    add_example(page)
    file = tmp_path / "short.txt"
    file.write_text(
        "The school at Vessby was founded in 1802 by the sisters Ebba and Lovisa Dahl.",
        encoding="utf-8",
    )
    add_file(page, file)
    page.get_by_role("tab", name="Store").click()
    row = page.get_by_role("region", name="Bytes by source").locator(
        "tbody tr", has_text="short.txt"
    )
    kv = row.locator("td[data-column=KV]").inner_text()
    copies = re.findall(
        r"(memory|disk) (\S+\s\S+?)(?:,|$)",
        row.locator("td[data-column='copies by tier']").inner_text(),
    )
    assert set(dict(copies)) == {"memory", "disk"}
    assert kv in dict(copies).values()
    page.get_by_role("button", name="Delete short.txt").click()
    page.get_by_role("button", name="Keep it").click()
    expect(row).to_have_count(1)
    page.get_by_role("button", name="Delete short.txt").click()
    page.locator("#sure-yes").click()
    expect(row).to_have_count(0)


def test_live_numbers_come_from_the_server(page: Page, address: str) -> None:
    opened(page, address)
    add_example(page)
    asked(page)
    page.get_by_role("tab", name="Live").click()
    expect(page.get_by_role("heading", name="Time to the first token")).to_be_visible()
    expect(page.locator(".histogram li")).not_to_have_count(0)
    expect(page.locator("#live")).to_contain_text(
        re.compile(r"\d+% of [\d,]+ prompt tokens reused")
    )
    page.get_by_role("tab", name="Store").click()
    expect(page.get_by_role("heading", name="Tiers")).to_be_visible()


def test_nothing_is_shown_without_the_key_and_the_key_stays_in_the_tab(
    page: Page, context: BrowserContext, locked: str
) -> None:
    page.goto(locked)
    dialog = page.get_by_role("dialog", name="API key")
    expect(dialog).to_contain_text("needs an API key")
    page.keyboard.press("Escape")
    expect(dialog).to_be_visible()
    assert page.locator("#model").inner_text() == ""
    dialog.get_by_label("Key", exact=True).fill("a-key-that-nobody-knows")
    dialog.get_by_role("button", name="Use this key").click()
    expect(dialog).to_contain_text("does not know that key")
    dialog.get_by_label("Key", exact=True).fill(KEY)
    page.keyboard.press("Enter")
    page.locator("html[data-ready=yes]").wait_for()
    expect(page.locator("#model")).not_to_be_empty()
    assert page.evaluate("Object.values(localStorage).join() + document.cookie") == ""
    assert page.evaluate("Object.values(sessionStorage)") == [KEY]
    assert KEY not in page.content()
    page.reload()
    page.locator("html[data-ready=yes]").wait_for()
    other = context.new_page()
    other.goto(locked)
    expect(other.get_by_role("dialog", name="API key")).to_be_visible()
    other.close()
    page.get_by_role("button", name="Forget key").click()
    expect(page.get_by_role("dialog", name="API key")).to_be_visible()


def test_all_of_it_goes_by_keyboard(page: Page, address: str) -> None:
    opened(page, address)
    add_example(page)
    page.reload()
    page.locator("html[data-ready=yes]").wait_for()

    def focus(selector: str) -> None:
        for _ in range(80):
            if page.evaluate("(s) => document.activeElement.matches(s)", selector):
                return
            page.keyboard.press("Tab")
        pytest.fail(f"Tab never came to {selector}")

    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    focus("#tab-try")
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("heading", name="Tiers")).to_be_visible()
    page.keyboard.press("ArrowLeft")
    focus("#files")
    focus("#example")
    focus("#passages")
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#passages-told")).to_have_text("5")
    focus("#question")
    page.keyboard.type(QUESTION)
    page.keyboard.press("Enter")
    turn = answered(page)
    focus(".segment.chunk")
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    page.keyboard.press("Enter")
    expect(turn.locator(".detail")).to_be_visible()
    page.keyboard.press("Space")
    expect(turn.locator(".detail")).to_be_hidden()


def test_a_running_answer_can_be_stopped(page: Page, address: str) -> None:
    opened(page, address)
    page.get_by_label("Maximum tokens of an answer").fill("256")
    page.get_by_label("Question", exact=True).fill(
        "Write a long story about a ship, with many chapters."
    )
    page.get_by_role("button", name="Ask", exact=True).click()
    page.locator(".turn .answer:not(:empty)").first.wait_for()
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_role("button", name="Ask", exact=True)).to_be_enabled()
    expect(page.locator(".turn").first).to_contain_text("stopped")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_it_can_be_read_in_both_themes_and_at_every_width(
    page: Page, address: str, theme: str, picture: Callable[..., Path]
) -> None:
    page.emulate_media(color_scheme=theme)  # type: ignore[arg-type]
    opened(page, address)
    add_example(page)
    turn = asked(page)
    turn.locator(".segment.chunk").nth(1).click()
    for name, width in WIDTHS.items():
        page.set_viewport_size({"width": width, "height": 1300 if width < 1000 else 1150})
        page.evaluate("window.scrollTo(0, 0)")
        assert overflow(page) == 0
        if width < 821:
            turn.scroll_into_view_if_needed()
            turn.evaluate(
                "(each) => window.scrollTo(0, each.getBoundingClientRect().top + scrollY - 12)"
            )
        if (theme, name) == ("light", "wide"):
            picture(page, "try-light-wide")
    for view in ("Try", "Store", "Live"):
        page.get_by_role("tab", name=view).click()
        expect(page.locator(f"#{view.lower()} h2").first).to_be_visible()
        for width in WIDTHS.values():
            page.set_viewport_size({"width": width, "height": 900})
            assert overflow(page) == 0
        assert page.evaluate(CONTRASTS) == []
        assert page.evaluate(UNNAMED) == []


def test_the_api_page_shows_every_route_and_finds_fields(page: Page, address: str) -> None:
    page.goto(f"{address}/docs")
    expect(page.locator(".route")).not_to_have_count(0)
    n_routes = page.locator(".route").count()
    assert n_routes > 25
    page.get_by_label("Find a route or field").fill("previous_response_id")
    shown = page.locator(".route:visible")
    expect(shown).to_have_count(1)
    shown.locator("summary").click()
    expect(shown).to_contain_text("max_output_tokens")
    assert page.evaluate(CONTRASTS) == []
    assert page.evaluate(UNNAMED) == []
    assert overflow(page) == 0
