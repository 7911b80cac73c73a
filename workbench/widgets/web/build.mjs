// Bundles src/ into dist/: builder.js, builder.css and the licences of what is bundled. The header of builder.js carries
// the hash of everything that it is made from, which tests/unit/test_web_bundle.py computes again.

import { build } from "esbuild";
import { createHash } from "node:crypto";
import { mkdir, readdir, readFile, writeFile } from "node:fs/promises";
import { dirname, join, relative, resolve } from "node:path";
import { fileURLToPath } from "node:url";

const HOME = dirname(fileURLToPath(import.meta.url));
const OUT = resolve(HOME, process.argv[2] ?? "dist");
const FILES = ["build.mjs", "package.json", "package-lock.json", "tsconfig.json"];
const SHARED = ["gantt.css", "gantt.js", "strip.css", "strip.js"].map((name) => `../parts/${name}`);

async function sources() {
  const inside = await readdir(join(HOME, "src"), { recursive: true, withFileTypes: true });
  const src = inside.filter((entry) => entry.isFile()).map((entry) => relative(HOME, join(entry.parentPath, entry.name)));
  return [...FILES, ...SHARED, ...src].sort();
}

async function hashed(files) {
  const hash = createHash("sha256");
  for (const file of files) {
    hash.update(`${file}\0`);
    hash.update(await readFile(join(HOME, file)));
    hash.update("\0");
  }
  return hash.digest("hex");
}

async function licences(inputs) {
  const folders = new Set();
  for (const input of Object.keys(inputs)) {
    const found = input.match(/^(.*node_modules\/(?:@[^/]+\/)?[^/]+)\//);
    if (found) folders.add(found[1]);
  }
  const texts = [];
  for (const folder of [...folders].sort()) {
    const about = JSON.parse(await readFile(join(HOME, folder, "package.json"), "utf8"));
    const names = await readdir(join(HOME, folder));
    const file = names.find((name) => /^licen[cs]e(\.|$)/i.test(name));
    if (!file) throw new Error(`${about.name} has no licence file; add its text by hand or leave it out`);
    const text = await readFile(join(HOME, folder, file), "utf8");
    texts.push(`${about.name} ${about.version} (${about.license})\n\n${text.trim()}\n`);
  }
  return `builder.js and builder.css contain these packages.\n\n${texts.join(`\n${"-".repeat(100)}\n\n`)}`;
}

const made = await build({
  absWorkingDir: HOME,
  entryPoints: { builder: "src/index.tsx" },
  outdir: OUT,
  bundle: true,
  format: "esm",
  target: "es2022",
  minify: true,
  legalComments: "none",
  charset: "utf8",
  jsx: "automatic",
  define: { "process.env.NODE_ENV": '"production"' },
  metafile: true,
  write: false,
});
const header = `/* sources sha256 ${await hashed(await sources())}; made by \`npm ci && npm run build\` in workbench/widgets/web */\n`;
await mkdir(OUT, { recursive: true });
for (const file of made.outputFiles) await writeFile(file.path, header + file.text);
await writeFile(join(OUT, "LICENSES.txt"), await licences(made.metafile.inputs));
