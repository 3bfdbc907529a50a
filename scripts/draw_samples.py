"""Draw the photos of the tutorial: `python -m scripts.draw_samples FOLDER`.

Three classes of traffic lights, one folder each: `go`, `stop` and `wait`. The pictures are drawn
by this file with fixed seeds, so they have no licence but that of the project.
"""

import argparse
import random
from pathlib import Path

from PIL import Image, ImageDraw, ImageFilter

SIDE = 240
LAMPS = {"stop": (214, 40, 30), "wait": (240, 178, 40), "go": (40, 176, 90)}  # from the top
OFF = 46


def draw(lamp: str, chance: random.Random) -> Image.Image:
    """A traffic light with one lamp on, before a sky, a wall or trees."""
    tint = chance.choice([(150, 180, 215), (176, 160, 140), (110, 135, 100)])
    image = Image.new("RGB", (SIDE, SIDE), tint)
    pen = ImageDraw.Draw(image)
    for _ in range(60):
        x, y, size = (chance.randint(0, SIDE), chance.randint(0, SIDE), chance.randint(10, 60))
        shade = chance.randint(-28, 28)
        pen.ellipse((x, y, x + size, y + size), tuple(part + shade for part in tint))
    image = image.filter(ImageFilter.GaussianBlur(chance.uniform(2, 5)))
    pen = ImageDraw.Draw(image)
    lamp_size = chance.randint(30, 52)
    left = chance.randint(30, SIDE - lamp_size - 50)
    top = chance.randint(8, max(9, SIDE - 4 * lamp_size))
    housing = chance.randint(20, 60)
    bottom = top + 3 * lamp_size + 24
    pen.rectangle((left + lamp_size // 2, bottom, left + lamp_size // 2 + 12, SIDE), (70, 70, 70))
    pen.rounded_rectangle((left, top, left + lamp_size + 12, bottom), 10, (housing,) * 3)
    for place, (name, colour) in enumerate(LAMPS.items()):
        y = top + 6 + place * (lamp_size + 6)
        bright = chance.uniform(0.85, 1.1)
        lit = tuple(min(255, int(part * bright)) for part in colour)
        pen.ellipse(
            (left + 6, y, left + 6 + lamp_size, y + lamp_size), lit if name == lamp else (OFF,) * 3
        )
    return image.rotate(chance.uniform(-6, 6), fillcolor=tint).filter(ImageFilter.GaussianBlur(0.6))


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the photos of the tutorial.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--each", type=int, default=25, help="photos of each class")
    options = parser.parse_args()
    for name in LAMPS:
        folder = options.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(options.each):
            image = draw(name, random.Random(f"{name} {number}"))
            image.save(folder / f"{number:02}.jpg", quality=90)


if __name__ == "__main__":
    main()
