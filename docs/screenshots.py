"""Take the pictures of the documentation in Chromium: python docs/screenshots.py RUN PICTURE

RUN is a run of `nofuss train` on pictures (docs/start.md), PICTURE one to drop on its page. Writes
page.png, img/report.webp and img/phone.webp.
"""

import base64
import io
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

DOCS = Path(__file__).parent


def shot(browser: webdriver.Chrome, file: str, width: int, height: int) -> None:
    """Save what the browser shows at this size."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    time.sleep(4)
    content = base64.b64decode(browser.get_screenshot_as_base64())
    picture = Image.open(io.BytesIO(content)).convert("RGB")
    if file.endswith(".png"):  # 256 colours: a third of the bytes
        picture = picture.quantize(256, kmeans=3, dither=Image.Dither.FLOYDSTEINBERG)
        picture.save(DOCS / file, optimize=True)
    else:
        picture.save(DOCS / file, quality=80)


def main(run: Path, picture: Path) -> None:
    """Show the report, then a search on the page."""
    options = webdriver.ChromeOptions()
    with tempfile.TemporaryDirectory() as profile:
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        for flag in [*flags, "--disable-background-networking", f"--user-data-dir={profile}"]:
            options.add_argument(flag)
        command = [sys.executable, "-u", "-m", "nofuss", "serve", str(run), "--port", "0"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        address = next(line.split()[1] for line in server.stdout if line.startswith("open "))
        browser = webdriver.Chrome(options, Service(shutil.which("chromedriver")))
        try:
            browser.get((run / "report.html").resolve().as_uri())
            shot(browser, "img/report.webp", 1000, 900)
            for file, width, height in (("page.png", 1000, 765), ("img/phone.webp", 390, 780)):
                browser.get(address)
                shot(browser, file, width, height)  # the page adapts to its size first
                upload = browser.find_element(By.CSS_SELECTOR, "input[type=file]")
                upload.send_keys(str(picture.resolve()))
                answer = browser.find_element(By.ID, "verdict")
                WebDriverWait(browser, 120).until(lambda _, answer=answer: answer.is_displayed())
                shot(browser, file, width, height)
        finally:
            browser.quit()
            server.terminate()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
