// @ts-check
/** Draws a task's attention grid over the image it is about. */

/**
 * @typedef {{resize: number | number[] | null, crop: number[] | null, patch: number[]}} View
 * @typedef {{on_patches: number, grid: number[][]}} Attention
 */

// From low to high attention: colours that differ in lightness too, so that no hue has to be told
// from another.
const RAMP = [
  [12, 12, 40],
  [74, 28, 104],
  [190, 55, 90],
  [243, 129, 48],
  [250, 232, 130],
];

/** The ramp's colours, for a legend. */
export const COLOURS = RAMP.map((colour) => `rgb(${colour.join(" ")})`);

const BRIGHTEST = 0.95; // the share of patches from which on they are drawn alike

/**
 * The part of an image that its grid covers, in fractions of its width and height.
 * @param {View} view
 * @param {number[][]} grid
 * @param {number} width
 * @param {number} height
 */
export function region(view, grid, width, height) {
  let [tall, wide] = [height, width];
  if (Array.isArray(view.resize)) [tall, wide] = view.resize;
  else if (view.resize !== null) {
    const scale = view.resize / Math.min(width, height);
    [tall, wide] = [height * scale, width * scale];
  }
  const [cropTall, cropWide] = view.crop ?? [tall, wide];
  const [top, left] = [(tall - cropTall) / 2, (wide - cropWide) / 2];
  const [seenTall, seenWide] = [grid.length * view.patch[0], grid[0].length * view.patch[1]];
  return {
    left: left / wide,
    top: top / tall,
    right: (left + seenWide) / wide,
    bottom: (top + seenTall) / tall,
  };
}

/**
 * A picture to draw on: `canvas` may be smaller than the picture itself.
 * @typedef {{canvas: HTMLCanvasElement, width: number, height: number}} Picture
 */

/**
 * The picture, and over it, unless null, the attention of a task. Areas outside the crop are dimmed.
 * @param {HTMLCanvasElement} canvas
 * @param {Picture} picture
 * @param {Attention | null} attention
 * @param {View | null} view
 */
export function draw(canvas, picture, attention, view) {
  const context = context2d(canvas);
  const { width, height } = canvas;
  context.clearRect(0, 0, width, height);
  context.drawImage(picture.canvas, 0, 0, width, height);
  if (!attention || !view) return;
  const part = region(view, attention.grid, picture.width, picture.height);
  const [x, y] = [part.left * width, part.top * height];
  const [wide, tall] = [(part.right - part.left) * width, (part.bottom - part.top) * height];
  const outside = new Path2D();
  outside.rect(0, 0, width, height);
  outside.rect(x, y, wide, tall);
  context.fillStyle = "rgb(8 10 14 / 0.6)";
  context.fill(outside, "evenodd");
  context.drawImage(tinted(attention.grid), x, y, wide, tall);
}

/**
 * The cropped image with the attention of a task.
 * @param {HTMLCanvasElement} canvas
 * @param {Picture} picture
 * @param {Attention} attention
 * @param {View} view
 */
export function drawSeen(canvas, picture, attention, view) {
  const part = region(view, attention.grid, picture.width, picture.height);
  const { width, height } = picture.canvas;
  const from = [part.left * width, part.top * height];
  const size = [(part.right - part.left) * width, (part.bottom - part.top) * height];
  const context = context2d(canvas);
  context.drawImage(
    picture.canvas,
    from[0],
    from[1],
    size[0],
    size[1],
    0,
    0,
    canvas.width,
    canvas.height,
  );
  context.drawImage(tinted(attention.grid), 0, 0, canvas.width, canvas.height);
}

/** @param {HTMLCanvasElement} canvas */
function context2d(canvas) {
  const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  context.imageSmoothingQuality = "high";
  return context;
}

/**
 * One pixel per patch, coloured by its share of the strongest patch.
 * @param {number[][]} grid
 */
function tinted(grid) {
  const small = document.createElement("canvas");
  [small.width, small.height] = [grid[0].length, grid.length];
  const context = context2d(small);
  const values = grid.flat();
  // Some ViTs rest much of their attention on a few patches of no content, often the corners. On a scale that ends
  // there nothing else would be seen, so the brightest patches are drawn alike.
  const ranked = [...values].sort((a, b) => a - b);
  const [least, most] = [ranked[0], ranked[Math.floor((ranked.length - 1) * BRIGHTEST)]];
  const pixels = context.createImageData(small.width, small.height);
  values.forEach((value, place) => {
    const strength = most > least ? Math.min(1, (value - least) / (most - least)) : 0;
    pixels.data.set([...colour(strength), 255 * (0.38 + 0.36 * strength)], place * 4);
  });
  context.putImageData(pixels, 0, 0);
  return small;
}

/** @param {number} strength between 0 and 1 */
function colour(strength) {
  const place = strength * (RAMP.length - 1);
  const below = Math.min(Math.floor(place), RAMP.length - 2);
  return RAMP[below].map((from, i) => from + (RAMP[below + 1][i] - from) * (place - below));
}
