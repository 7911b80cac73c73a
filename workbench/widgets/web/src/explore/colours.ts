// The scale of a heat map: viridis, as the pictures of matplotlib have it, even in lightness and legible to everybody.

const STOPS = ["#440154", "#472d7b", "#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962", "#addc30", "#fde725"].map(channels);

export const GRADIENT = `linear-gradient(to right, ${STOPS.map(css).join(", ")})`;

function channels(hex: string): number[] {
  return [1, 3, 5].map((at) => Number.parseInt(hex.slice(at, at + 2), 16));
}

function css(rgb: number[]): string {
  return `rgb(${rgb.map(Math.round).join(" ")})`;
}

// Colour of a share of the scale from 0 to 1, and of the text on it.
export function shade(share: number): { background: string; color: string } {
  const along = Math.min(1, Math.max(0, share)) * (STOPS.length - 1);
  const below = Math.min(STOPS.length - 2, Math.floor(along));
  const rgb = STOPS[below]!.map((channel, index) => channel + (along - below) * (STOPS[below + 1]![index]! - channel));
  return { background: css(rgb), color: luminance(rgb) > 0.18 ? "#000" : "#fff" };
}

// Relative luminance; black and white text are equally legible at 0.18.
function luminance(rgb: number[]): number {
  const [red, green, blue] = rgb.map((channel) => {
    const share = channel / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red! + 0.7152 * green! + 0.0722 * blue!;
}
