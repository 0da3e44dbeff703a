"""The filter of the page in a real browser, over columns whose names and values are markup."""

import csv
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from nofuss.search.update import update_index
from tests.browser import complaints
from tests.search.page.test_browser import wait
from tests.search.serving import Server, serving
from tests.tiny_run import train_pictures

HOSTILE = "<b onclick=alert(1)>"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    run = train_pictures(tmp_path_factory.mktemp("filter"))
    update_index(run, write_table(run.parent / "data"))
    with serving(run) as server:
        yield server


def write_table(data: Path) -> Path:
    with (data / "list.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["path", "label", "price", HOSTILE])
        for i, picture in enumerate(sorted(data.rglob("*.png"))):
            table.writerow([picture.relative_to(data), picture.parent.name, i, f"<i>{i % 2}</i>"])
    return data / "list.csv"


def shown(browser: webdriver.Chrome, kind: str) -> list[str]:
    script = "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)"
    found: list[str] = browser.execute_script(script, f"#results .{kind}")
    return found


@pytest.mark.slow
def test_filter_by_keyboard_and_correct_it(browser: webdriver.Chrome, server: Server) -> None:
    browser.get(server.url)
    wait(browser, lambda: len(shown(browser, "label")) == 12)
    assert f"price (number), {HOSTILE} (text)" in text(browser, "where-help") or (
        f"{HOSTILE} (text), price (number)" in text(browser, "where-help")
    )
    browser.find_element(By.CSS_SELECTOR, "#results button").click()
    wait(browser, lambda: len(shown(browser, "rank")) == 24)
    field = browser.find_element(By.ID, "where")
    field.send_keys(f"price<6 and `{HOSTILE}`=='<i>1</i>'", Keys.ENTER)
    wait(browser, lambda: 0 < len(shown(browser, "rank")) < 24)
    columns = shown(browser, "column")
    assert {f"{HOSTILE}: <i>1</i>"} == {column for column in columns if "price" not in column}
    prices = {column for column in columns if column.startswith("price")}
    assert prices <= {"price: 1", "price: 3", "price: 5"}
    field.clear()
    field.send_keys("prize<6", Keys.ENTER)
    wait(browser, lambda: "no column prize at character 1" in text(browser, "error"))
    field.clear()
    field.send_keys("price<0", Keys.ENTER)
    wait(browser, lambda: text(browser, "match") == "Nothing else passes the filter.")
    assert browser.find_element(By.ID, "match").is_displayed()
    field.clear()
    field.send_keys(Keys.ENTER)
    wait(browser, lambda: len(shown(browser, "rank")) == 24 and not text(browser, "error"))
    assert text(browser, "match") != "Nothing else passes the filter."
    phone = {"width": 360, "height": 740, "deviceScaleFactor": 2, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 360
    assert field.size["width"] > 150
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    browser.get(f"{server.url}&where={quote('price<0')}")
    wait(browser, lambda: text(browser, "status") == "Nothing passes the filter.")
    messages = [message for message in complaints(browser) if "400" not in message]
    assert messages == []


def text(browser: webdriver.Chrome, name: str) -> str:
    return browser.find_element(By.ID, name).get_attribute("textContent") or ""


@pytest.mark.parametrize("where", ["price<", "x==1", "price<'a'", "price<1;drop table x", "\0"])
def test_a_filter_that_can_not_be_read_is_one_line(server: Server, where: str) -> None:
    answer = server.request(f"/api/search?item={server.item(0)}&where={quote(where)}")
    assert answer.status == 400
    assert answer.json["error"].startswith("the filter can't be read: ")


def test_what_a_filter_finds(server: Server) -> None:
    about = server.request("/api/about").json
    assert about["columns"] == {"price": "number", HOSTILE: "text"}
    answer = server.request(
        f"/api/search?item={server.item(0)}&k=100&where={quote('price>=10 and price<13')}"
    )
    assert sorted(r["columns"]["price"] for r in answer.json["results"]) == ["10", "11", "12"]
    some = server.request(f"/api/some?where={quote('price<3')}").json["results"]
    assert sorted(item["columns"]["price"] for item in some) == ["0", "1", "2"]
    assert server.request("/api/some?where=price%3C", method="GET").status == 400
