// Python in a thread of its own: the page stays usable while it computes.
import { loadPyodide } from "./pyodide.mjs";

const here = (name) => new URL(name, import.meta.url).href;
const fetched = async (name) => {
  const answer = await fetch(here(name));
  if (!answer.ok) throw new Error(`${name}: ${answer.status}`);
  return answer.arrayBuffer();
};

let waiting = null; // the latest question alone
let wake = () => {};
addEventListener("message", ({ data }) => { waiting = data; wake(); });
const breath = () => new Promise((done) => { setTimeout(done); });

async function start() {
  const [python, code, lock] = await Promise.all([
    loadPyodide({ indexURL: here("./"), lockFileContents: LOCK, packageBaseUrl: here("./") }),
    fetched("whichlora.zip"),
  ]);
  python.unpackArchive(code, "zip", { extractDir: "/whichlora" });
  python.runPython("import sys; sys.path.insert(0, '/whichlora')");
  return python.runPython("from whichlora.page.questions import answer; answer");
}

// a page has no packages beside the standard library
const LOCK = { info: { abi_version: "2026_0", arch: "wasm32", platform: "emscripten_5_0_3", python: "3.14.2" }, packages: {} };

try {
  const answer = await start();
  postMessage({ ready: true });
  for (;;) {
    if (waiting === null) await new Promise((resume) => { wake = resume; });
    const { id, question } = waiting;
    waiting = null;
    const parts = answer(question);
    for (const part of parts) {
      postMessage({ id, part: JSON.parse(part) });
      await breath(); // a later question ends this one
      if (waiting !== null) break;
    }
    parts.destroy();
    if (waiting === null) postMessage({ id, done: true });
  }
} catch (error) {
  postMessage({ fault: String(error && error.message ? error.message : error) });
}
