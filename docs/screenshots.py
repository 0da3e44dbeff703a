"""Take the screenshots of docs/photos.md in Chromium: python docs/screenshots.py RUN

RUN is any run of `nofuss train` on pictures. Writes img/report.webp, img/page.webp, img/phone.webp.
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

IMAGES = Path(__file__).parent / "img"
QUALITY = 80


def shot(browser: webdriver.Chrome, name: str, width: int, height: int) -> None:
    """Save what the browser shows at this size."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    time.sleep(1.5)
    content = base64.b64decode(browser.get_screenshot_as_base64())
    Image.open(io.BytesIO(content)).convert("RGB").save(IMAGES / f"{name}.webp", quality=QUALITY)


def main(run: Path) -> None:
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
            shot(browser, "report", 1000, 900)
            for name, width, height in (("page", 1000, 900), ("phone", 390, 780)):
                browser.get(address)
                shot(browser, name, width, height)  # the page adapts to its size before the click
                browser.find_elements(By.CSS_SELECTOR, "#results button")[2].click()
                time.sleep(2)
                shot(browser, name, width, height)
        finally:
            browser.quit()
            server.terminate()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
