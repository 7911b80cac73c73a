// Bundles the tests, which import TypeScript, and runs them with node's own runner.

import { spawnSync } from "node:child_process";
import { mkdtemp, readdir, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

import { build } from "esbuild";

const HERE = dirname(fileURLToPath(import.meta.url));
const out = await mkdtemp(join(tmpdir(), "web-tests-"));
const tests = (await readdir(HERE)).filter((name) => name.endsWith(".test.mjs")).map((name) => join(HERE, name));
await build({ entryPoints: tests, outdir: out, bundle: true, platform: "node", format: "esm", outExtension: { ".js": ".mjs" } });
const made = (await readdir(out)).map((name) => join(out, name));
const run = spawnSync(process.execPath, ["--test", ...made], { stdio: "inherit" });
await rm(out, { recursive: true });
process.exit(run.status ?? 1);
