"""The page in a real browser: drop, paste or choose a picture, click through, filter, the map."""

import base64
import io
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

from tests.browser import complaints
from tests.search.serving import Server
from tests.tiny_run import HOSTILE, draw

HAND_OVER = """
const bytes = Uint8Array.from(atob(arguments[0]), (c) => c.charCodeAt(0));
const hand = new DataTransfer();
hand.items.add(new File([bytes], "picture.png", {type: "image/png"}));
const options = {bubbles: true, cancelable: true};
document.getElementById("drop").dispatchEvent(arguments[1] === "drop"
  ? new DragEvent("drop", {dataTransfer: hand, ...options})
  : new ClipboardEvent("paste", {clipboardData: hand, ...options}));
"""


@pytest.fixture
def page(browser: webdriver.Chrome, server: Server) -> webdriver.Chrome:
    """The page, opened anew, with its first items and its map."""
    browser.get(server.url)
    wait(browser, lambda: len(cards(browser)) == 12)
    wait(browser, lambda: not find(browser, "drawing").is_displayed())
    assert complaints(browser) == []
    return browser


def wait(browser: webdriver.Chrome, until: Callable[[], bool]) -> None:
    # Results may be replaced while they are read: then it is not yet so.
    WebDriverWait(browser, 60, ignored_exceptions=[StaleElementReferenceException]).until(
        lambda _: until()
    )


def script(browser: webdriver.Chrome, body: str, *given: object) -> Any:
    """What a function of the page's modules returns."""
    modules = "Promise.all(['./search.js', './map.js'].map((name) => import(name)))"
    begun = f"return {modules}.then(([{{ present, search, state }}, {{ plane }}]) => {{ {body} }})"
    return browser.execute_script(begun, *given)


def find(browser: webdriver.Chrome, name: str) -> WebElement:
    return browser.find_element(By.ID, name)


def cards(browser: webdriver.Chrome) -> list[WebElement]:
    return browser.find_elements(By.CSS_SELECTOR, "#results .open")


def labels(browser: webdriver.Chrome) -> list[str]:
    return [e.text for e in browser.find_elements(By.CSS_SELECTOR, "#results .label")]


def shown_items(browser: webdriver.Chrome) -> list[str | None]:
    return [card.get_attribute("data-item") for card in cards(browser)]


def title(browser: webdriver.Chrome) -> str:
    return find(browser, "results-title").text


def png(label: int, number: int) -> bytes:
    with io.BytesIO() as file:
        draw(label, number).save(file, "PNG")
        return file.getvalue()


def test_it_opens_without_the_token_in_its_address(page: webdriver.Chrome) -> None:
    assert "token" not in page.current_url
    assert "31 items of 6 classes" in find(page, "about").text
    page.refresh()  # the cookie is enough now
    wait(page, lambda: len(cards(page)) == 12)


@pytest.mark.parametrize("way", ["drop", "paste"])
def test_a_picture_that_is_handed_over_finds_its_like(page: webdriver.Chrome, way: str) -> None:
    page.execute_script(HAND_OVER, base64.b64encode(png(3, 2)).decode(), way)
    wait(page, lambda: title(page) == "Neighbours of your picture")
    first = cards(page)[0]
    assert first.get_attribute("title") == "plain/2<i>.png"
    assert first.text.split() == ["plain", "#1", "0.000"]
    assert "rank 1, plain, distance 0.000" in first.get_attribute("aria-label")
    assert find(page, "status").text == "24 of 31 items"
    numbers = page.find_element(By.CSS_SELECTOR, "#verdict summary")
    assert not find(page, "figures").is_displayed(), "numbers are for those who ask"
    numbers.click()
    assert "The nearest is at distance 0.00" in find(page, "figures").text
    assert " ms" in find(page, "figures").text
    assert find(page, "query").get_attribute("src").startswith("data:image/")
    wait(
        page,
        lambda: bool(
            page.execute_script("return document.querySelector('#results img').naturalWidth > 0")
        ),
    )
    assert complaints(page) == []


def test_a_picture_is_chosen_then_results_are_clicked_through(
    page: webdriver.Chrome, tmp_path: Path
) -> None:
    (tmp_path / "new.png").write_bytes(png(4, 9))
    find(page, "file").send_keys(str(tmp_path / "new.png"))
    wait(page, lambda: title(page) == "Neighbours of your picture")
    assert len(cards(page)) == 24
    item = cards(page)[3].get_attribute("data-item")
    wanted = labels(page)[3]
    cards(page)[3].click()
    wait(page, lambda: title(page) == f"Neighbours of {wanted}")
    assert find(page, "query").get_attribute("src").endswith(f"/pictures/{item}")
    assert item not in [card.get_attribute("data-item") for card in cards(page)]
    assert len(cards(page)) == 24


def test_results_are_reached_by_keyboard(page: webdriver.Chrome) -> None:
    find(page, "some").send_keys(Keys.TAB)
    focused = page.switch_to.active_element
    assert focused == cards(page)[0]
    focused.send_keys(Keys.ENTER)
    wait(page, lambda: title(page).startswith("Neighbours of "))


def test_skipping_to_the_results_leaves_them(page: webdriver.Chrome) -> None:
    seen = shown_items(page)  # drawn at random each time
    page.find_element(By.CLASS_NAME, "skip").send_keys(Keys.ENTER)
    wait(page, lambda: page.current_url.endswith("#results-title"))
    page.back()
    wait(page, lambda: "#" not in page.current_url)
    time.sleep(0.5)
    assert shown_items(page) == seen


def test_a_part_of_a_name_is_enough_and_filters_the_map(page: webdriver.Chrome) -> None:
    shown = "return plane.only && [...plane.only].map((code) => state.about.classes[code])"
    find(page, "class").send_keys("PLA" + Keys.ENTER)
    wait(page, lambda: set(labels(page)) == {"plain"})
    assert script(page, shown) == ["plain"]
    cards(page)[0].click()
    wait(page, lambda: title(page) == "Neighbours of plain, only of class plain")
    find(page, "all").click()
    wait(page, lambda: script(page, shown) is None and len(cards(page)) == 24)
    find(page, "class").send_keys("nobody" + Keys.ENTER)
    wait(page, lambda: "no class like “nobody”" in find(page, "error").text)
    complaints(page)  # the browser notes the refused request


def test_a_bad_file_is_explained_and_clears_what_was_there(
    page: webdriver.Chrome, tmp_path: Path
) -> None:
    cards(page)[0].click()
    wait(page, lambda: find(page, "verdict").is_displayed())
    (tmp_path / "page.html").write_text("<script>alert(1)</script>")
    find(page, "file").send_keys(str(tmp_path / "page.html"))
    wait(page, lambda: find(page, "error").is_displayed())
    assert find(page, "error").text.startswith("This is not a picture of a known format")
    assert find(page, "error").get_attribute("role") == "alert"
    assert cards(page) == []
    assert title(page) == "No results"
    for name in ("verdict", "query", "more", "teach"):
        assert not find(page, name).is_displayed(), name
    find(page, "some").click()
    wait(page, lambda: not find(page, "error").is_displayed() and len(cards(page)) == 12)
    complaints(page)  # the browser notes the refused request


def test_every_search_has_an_address(page: webdriver.Chrome, tmp_path: Path) -> None:
    """Of an item and of an uploaded picture: reloaded, gone back to, opened by someone else."""
    (tmp_path / "new.png").write_bytes(png(4, 9))
    cards(page)[0].click()
    wait(page, lambda: "like=" in page.current_url)
    of_item, seen = page.current_url, shown_items(page)
    find(page, "file").send_keys(str(tmp_path / "new.png"))
    wait(page, lambda: title(page) == "Neighbours of your picture")
    wait(page, lambda: "vector=" in page.current_url)
    of_picture, of_picture_seen = page.current_url, shown_items(page)
    page.refresh()
    wait(page, lambda: shown_items(page) == of_picture_seen)
    assert find(page, "query").get_attribute("src").startswith("data:image/")
    page.back()
    wait(page, lambda: shown_items(page) == seen)
    page.get("about:blank")
    page.get(of_picture)
    wait(page, lambda: shown_items(page) == of_picture_seen)
    page.get(of_item)
    wait(page, lambda: shown_items(page) == seen)
    assert "token" not in of_item + of_picture
    assert complaints(page) == []


def test_an_address_of_something_else_is_explained(page: webdriver.Chrome, server: Server) -> None:
    for options in ("like=0123456789abcdef", "vector=AAAA", "vector=%3Cb%3E", "k=9999&like=x"):
        page.get(f"http://127.0.0.1:{server.port}/?{options}")
        wait(page, lambda: find(page, "error").is_displayed())
        assert cards(page) == []
    complaints(page)


def test_the_page_says_what_it_found(page: webdriver.Chrome) -> None:
    cards(page)[0].click()
    wait(page, lambda: find(page, "verdict").is_displayed())
    answer = script(page, "return state.answer")
    assert find(page, "match").text == answer["sentence"]
    assert find(page, "match").is_displayed() == bool(answer["sentence"])
    assert find(page, "likely").is_displayed() == bool(answer["likely"])
    if answer["likely"]:
        counted = Counter(labels(page)[:10]).most_common(1)[0][1]
        page.find_element(By.CSS_SELECTOR, "#verdict summary").click()
        assert f"{counted} of the first 10 are" in find(page, "figures").text
    assert find(page, "run").text == "run"
    assert "Recall@1 " in find(page, "about").text
    assert "a proxy: the point that stands for a whole class" in find(page, "map-help").text


@pytest.mark.parametrize("match", ["good", "unsure", "nothing"])
def test_each_answer_has_a_mark_that_is_drawn(page: webdriver.Chrome, match: str) -> None:
    """Whatever fonts there are; results are never dimmed, and nothing else is said."""
    cards(page)[0].click()
    wait(page, lambda: find(page, "verdict").is_displayed())
    said = f"{{ ...state.answer, match: '{match}', sentence: 'Said.', results: [] }}"
    script(page, f"present({{ answer: {said} }})")
    assert find(page, "match").text == "Said."
    [drawn] = find(page, "match").find_elements(By.CSS_SELECTOR, "svg.icon")
    assert drawn.size["width"] > 10
    assert find(page, "match").get_attribute("data-match") == match
    assert complaints(page) == []


def test_the_map_shows_items_and_leads_on(page: webdriver.Chrome) -> None:
    canvas = find(page, "map")
    page.execute_script("arguments[0].scrollIntoView({block: 'center'})", canvas)
    # An item that no star covers.
    item, x, y = script(
        page,
        """for (let i = 0; i < plane.data.items.length; i++) {
             const [x, y] = plane.onScreen(plane.data.places[2 * i], plane.data.places[2 * i + 1]);
             if (plane.starAt(x, y) < 0 && plane.nearest(x, y) === i) return [i, x, y];
           }""",
    )
    middle = canvas.size["width"] / 2, canvas.size["height"] / 2
    point = ActionChains(page).move_to_element_with_offset(canvas, x - middle[0], y - middle[1])
    point.perform()
    wait(page, lambda: find(page, "tip").is_displayed())
    label = script(page, f"return plane.labelOf({item})")
    assert find(page, "tip-words").text == label
    key = script(page, f"return plane.data.items[{item}]")
    assert find(page, "tip-picture").get_attribute("src").endswith(f"/pictures/{key}")
    point.click().perform()
    wait(page, lambda: title(page) == f"Neighbours of {label}")
    assert script(page, "return state.answer.place.length") == 2
    assert script(page, "return plane.data.stars.length") == 6
    canvas.send_keys("+")
    assert script(page, "return plane.zoom") > 1
    canvas.send_keys("0")
    assert script(page, "return plane.zoom") == 1
    drawn = """return plane.canvas.getContext("2d")
        .getImageData(0, 0, plane.canvas.width, plane.canvas.height).data.some((v) => v > 0);"""
    assert script(page, drawn)
    assert complaints(page) == []


def test_names_stay_text(page: webdriver.Chrome) -> None:
    find(page, "class").send_keys(HOSTILE + Keys.ENTER)
    wait(page, lambda: set(labels(page)) == {HOSTILE})
    cards(page)[0].click()
    wait(page, lambda: HOSTILE in title(page))
    assert set(labels(page)) == {HOSTILE}
    assert page.title != "1"
    assert page.find_elements(By.CSS_SELECTOR, "img[src='x']") == []
    assert complaints(page) == []
