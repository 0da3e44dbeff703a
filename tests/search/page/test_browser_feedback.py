"""Feedback and doubtful labels in a real browser: mouse, keyboard, phone, dark."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from nofuss.search.feedback import Mark, append, read_feedback
from nofuss.search.index import key_of
from nofuss.search.update import update_index
from tests.browser import complaints
from tests.search.page.test_browser import cards, find, png, script, shown_items, title, wait
from tests.search.page.test_labels import tell
from tests.search.serving import Server
from tests.tiny_run import draw

PHONE = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}


def forget(server: Server, run: Path) -> None:
    """Take everything back that was said."""
    feedback = read_feedback(run)
    append(run, [Mark(*pair, None) for pair in feedback.marks])
    append(run, [said._replace(corrected=None) for said in feedback.corrections.values()])
    some, other = server.item(0), server.item(1)
    for same in (True, None):  # the server reads what was appended
        marks = {"query": {"item": some}, "said": [{"item": other, "same": same}]}
        assert tell(server, "/api/feedback", marks).status == 200


@pytest.fixture
def page(
    browser: webdriver.Chrome, taught_server: Server, taught_run: Path
) -> Iterator[webdriver.Chrome]:
    """The results of one item, without any mark."""
    forget(taught_server, taught_run)
    browser.get(taught_server.url)
    wait(browser, lambda: len(cards(browser)) == 12)
    blue = key_of(str(taught_run.parent / "data" / "fruit" / "blue" / "3.png"))
    script(browser, f"search({{ item: '{blue}' }})")
    wait(browser, lambda: len(cards(browser)) == 24 and "Mark what" in find(browser, "teach").text)
    wait(browser, lambda: len(suspects(browser)) > 0)
    assert complaints(browser) == []
    yield browser
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def mark_buttons(page: webdriver.Chrome, at: int) -> list[WebElement]:
    return page.find_elements(By.CSS_SELECTOR, "#results li")[at].find_elements(
        By.CLASS_NAME, "mark"
    )


def marked(page: webdriver.Chrome) -> tuple[list[int], list[int]]:
    """The results that are marked the same, and those that are not."""
    entries = page.find_elements(By.CSS_SELECTOR, "#results li")
    classes = [(entry.get_attribute("class") or "").split() for entry in entries]
    same, other = ([i for i, c in enumerate(classes) if kind in c] for kind in ("same", "other"))
    return same, other


def suspects(page: webdriver.Chrome) -> list[WebElement]:
    return page.find_elements(By.CSS_SELECTOR, "#doubtful li")


def press(page: webdriver.Chrome, words: str) -> None:
    (button,) = [b for b in page.find_elements(By.CSS_SELECTOR, "#teach button") if b.text == words]
    button.click()


def test_marks_by_mouse_are_kept(page: webdriver.Chrome, taught_run: Path) -> None:
    mark_buttons(page, 0)[0].click()
    wait(page, lambda: marked(page) == ([0], []))
    mark_buttons(page, 2)[1].click()
    wait(page, lambda: marked(page) == ([0], [2]))
    # With Shift all from the last mark to this one.
    shift = ActionChains(page).key_down(Keys.SHIFT).click(mark_buttons(page, 5)[1])
    shift.key_up(Keys.SHIFT).perform()
    wait(page, lambda: marked(page) == ([0], [2, 3, 4, 5]))
    mark_buttons(page, 0)[0].click()  # a second press takes it back
    wait(page, lambda: marked(page) == ([], [2, 3, 4, 5]))
    press(page, "Rest is the same")
    wait(page, lambda: len(marked(page)[0]) == 20)
    assert "Marked: 20 the same, 4 not" in find(page, "teach").text
    assert len(read_feedback(taught_run).marks) == 24
    page.refresh()
    wait(page, lambda: marked(page)[1] == [2, 3, 4, 5])
    pressed = [b.get_attribute("aria-pressed") for b in mark_buttons(page, 2)]
    assert pressed == ["false", "true"]
    assert complaints(page) == []


def test_marks_by_keyboard(page: webdriver.Chrome) -> None:
    cards(page)[0].send_keys("s")
    wait(page, lambda: marked(page) == ([0], []))
    page.switch_to.active_element.send_keys(Keys.ARROW_RIGHT)
    assert page.switch_to.active_element == cards(page)[1]
    page.switch_to.active_element.send_keys("n")
    wait(page, lambda: marked(page) == ([0], [1]))
    page.switch_to.active_element.send_keys(Keys.ARROW_DOWN)
    columns = page.execute_script(
        "return getComputedStyle(document.getElementById('results'))"
        ".gridTemplateColumns.split(' ').length"
    )
    assert page.switch_to.active_element == cards(page)[1 + columns]
    page.switch_to.active_element.send_keys("N")  # with Shift: all since the last mark
    wait(page, lambda: marked(page) == ([0], list(range(1, 2 + columns))))
    page.switch_to.active_element.send_keys("n")
    wait(page, lambda: marked(page) == ([0], list(range(1, 1 + columns))))
    # The buttons are reached by Tab, and say what they mark.
    page.switch_to.active_element.send_keys(Keys.TAB)
    label = page.switch_to.active_element.get_attribute("aria-label") or ""
    assert label.startswith("the same: result ")
    page.switch_to.active_element.send_keys(Keys.ENTER)
    wait(page, lambda: marked(page)[0] == [0, 1 + columns])


def test_what_was_learned_is_shown_and_undone(page: webdriver.Chrome, taught_run: Path) -> None:
    model = taught_run / "model" / "model.json"
    before, seen, address = model.read_bytes(), shown_items(page), page.current_url
    mark_buttons(page, 20)[0].click()
    wait(page, lambda: marked(page) == ([20], []))
    mark_buttons(page, 0)[1].click()
    wait(page, lambda: marked(page) == ([20], [0]))
    press(page, "Learn from this")
    wait(page, lambda: find(page, "learned").is_displayed())
    text = find(page, "learned").text
    assert "Learned from 2 marks (2 pairs) in " in text
    assert "classes without a mark" in text
    assert len(page.find_elements(By.CSS_SELECTOR, "#learned .near")) == 20
    assert shown_items(page) != seen
    assert shown_items(page).index(seen[20]) < 20
    assert "learned from 2 marks" in find(page, "about").text
    buttons = page.find_elements(By.CSS_SELECTOR, "#learned button")
    (undo,) = [button for button in buttons if button.text == "Undo"]
    undo.click()
    wait(page, lambda: shown_items(page) == seen)
    wait(page, lambda: "Undone" in find(page, "status").text)
    assert "learned" not in find(page, "about").text
    assert (model.read_bytes(), page.current_url) == (before, address), "neither changes"
    assert complaints(page) == []


def test_a_picture_of_ones_own_teaches_too(page: webdriver.Chrome, tmp_path: Path) -> None:
    (tmp_path / "new.png").write_bytes(png(2, 70))
    find(page, "file").send_keys(str(tmp_path / "new.png"))
    wait(page, lambda: title(page) == "Neighbours of your picture")
    mark_buttons(page, 0)[0].click()
    wait(page, lambda: marked(page) == ([0], []))
    press(page, "Learn from this")
    wait(page, lambda: "two for a picture of your own" in find(page, "error").text)
    mark_buttons(page, 18)[0].click()
    wait(page, lambda: marked(page) == ([0, 18], []))
    address = page.current_url
    press(page, "Learn from this")
    wait(page, lambda: find(page, "learned").is_displayed())
    assert page.current_url == address
    assert find(page, "query").get_attribute("src").startswith("data:image/")
    wait(page, lambda: len(marked(page)[0]) == 2)
    press(page, "Undo what it learned last")
    wait(page, lambda: "Undone" in find(page, "status").text)
    complaints(page)  # the browser notes that learning was refused


def test_a_doubtful_label_is_corrected_by_mouse_and_keyboard(
    page: webdriver.Chrome, taught_run: Path
) -> None:
    (doubt,) = [s for s in suspects(page) if "labelled red" in s.text]
    assert "neighbours are blue fruit" in " ".join(doubt.text.split())
    assert doubt.find_elements(By.CSS_SELECTOR, ".nears img")
    first, second = doubt.find_elements(By.CLASS_NAME, "choice")
    assert (first.text, second.text) == ("It is blue", "red is right")
    doubt.find_element(By.CLASS_NAME, "look").click()
    wait(page, lambda: "Neighbours of red" in find(page, "results-title").text)
    first.click()
    wait(page, lambda: said(taught_run) == ["fruit/blue"])
    wait(page, lambda: "Neighbours of blue" in find(page, "results-title").text)  # at once
    wait(page, lambda: pressed(page) == "It is blue")  # the focus is still on what was pressed
    page.switch_to.active_element.send_keys(Keys.TAB)
    page.switch_to.active_element.send_keys(Keys.SPACE)
    wait(page, lambda: said(taught_run) == ["red"])
    wait(page, lambda: pressed(page) == "red is right")
    (doubt,) = [s for s in suspects(page) if "labelled red" in s.text]
    doubt.find_element(By.CLASS_NAME, "another").send_keys("fruit/green" + Keys.ENTER)
    wait(page, lambda: said(taught_run) == ["fruit/green"])
    page.refresh()
    wait(page, lambda: "(1 so far)" in find(page, "doubts-help").text)
    assert "--corrections RUN/feedback.jsonl" in find(page, "doubts-help").text
    (doubt,) = [s for s in suspects(page) if "labelled red" in s.text]
    doubt.find_element(By.CLASS_NAME, "another").send_keys("nobody" + Keys.ENTER)
    wait(page, lambda: "no such class" in find(page, "error").text.lower())
    assert said(taught_run) == ["fruit/green"]
    complaints(page)


def pressed(page: webdriver.Chrome) -> str:
    """The words on the button that has the focus, once the page has drawn it as pressed."""
    focused = page.switch_to.active_element
    return focused.text if focused.get_attribute("aria-pressed") == "true" else ""


def said(run: Path) -> list[str | None]:
    return [said.corrected for said in read_feedback(run).corrections.values()]


def test_nested_names_start_with_the_leaf(page: webdriver.Chrome) -> None:
    entry = next(c for c in cards(page) if "blue" in c.text)
    assert entry.find_element(By.CLASS_NAME, "label").text == "blue"
    assert entry.find_element(By.CLASS_NAME, "way").text == "fruit"
    wait(page, lambda: script(page, "return plane.named") == 3)  # regions with their names


def test_all_of_it_fits_a_phone_in_light_and_dark(page: webdriver.Chrome) -> None:
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", PHONE)
    for scheme in ("light", "dark"):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        mark_buttons(page, 1)[0].click()
        wait(page, lambda: marked(page)[0] in ([1], []))
        assert page.execute_script("return document.documentElement.scrollWidth") <= 390
        small = page.execute_script(
            """return [...document.querySelectorAll("main button, main input:not([type=file])")]
                 .filter((e) => e.offsetParent && e.offsetHeight < 34).length"""
        )
        assert small == 0  # everything can be hit with a finger
        contrast = "return getComputedStyle(document.querySelector('.doubt')).color"
        assert page.execute_script(contrast) == page.execute_script(
            "return getComputedStyle(document.body).color"
        )


def test_what_another_command_has_changed_is_shown(
    page: webdriver.Chrome, taught_run: Path, tmp_path: Path
) -> None:
    mark_buttons(page, 0)[0].click()
    wait(page, lambda: marked(page) == ([0], []))
    said = find(page, "about").text
    (tmp_path / "more").mkdir()
    draw(0, 90).save(tmp_path / "more" / "new.png")
    update_index(taught_run, tmp_path / "more")
    press(page, "Learn from this")
    wait(page, lambda: "the page shows it now" in find(page, "error").text)
    wait(page, lambda: find(page, "about").text not in (said, ""))
    press(page, "Learn from this")
    wait(page, lambda: find(page, "learned").is_displayed())
    complaints(page)  # the browser notes that learning was refused
