// Python in a thread of its own: the page stays usable while it computes.
import createPyodideModule from "./pyodide.asm.mjs";
import { loadPyodide } from "./pyodide.mjs";

const here = (name) => new URL(name, import.meta.url).href;
const fetched = async (name) => {
  const answer = await fetch(here(name));
  if (!answer.ok) throw new Error(`${name}: ${answer.status}`);
  return answer;
};
const unzipped = (answer) => new Response(answer.body.pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();

let waiting = null; // the latest question alone
let wake = () => {};
addEventListener("message", ({ data }) => { waiting = data; wake(); });
const breath = () => new Promise((done) => { setTimeout(done); });

// The memory of a Python that has answered, made when the page was built; null without one.
async function restored() {
  if (!new URL(import.meta.url).searchParams.has("snapshot")) return {};
  const snapshot = new Uint8Array(await unzipped(await fetched("snapshot.gz")));
  const enlarged = async (settings) => { // Pyodide restores it into the memory that is there
    const module = await createPyodideModule(settings);
    module._free(module._malloc(snapshot.length));
    return module;
  };
  return { _loadSnapshot: snapshot, createPyodideModule: enlarged };
}

// Files that the reader chose, where Python finds them by their names.
const written = new Map();
async function place(python, files) {
  for (const file of files) {
    const stamp = `${file.size} ${file.lastModified}`;
    if (written.get(file.name) === stamp) continue;
    python.FS.writeFile(file.name, new Uint8Array(await file.arrayBuffer()));
    written.set(file.name, stamp);
  }
}

async function start() {
  const code = fetched("whichlora.zip").then((answer) => answer.arrayBuffer());
  const python = await loadPyodide({ indexURL: here("./"), ...await restored() });
  python.unpackArchive(await code, "zip", { extractDir: "/whichlora" });
  python.FS.mkdirTree("/chosen");
  python.FS.chdir("/chosen");
  // as the snapshot's Python has it, which knows what is installed there
  const answer = python.runPython("import sys; '/whichlora' in sys.path or sys.path.insert(0, '/whichlora')\nfrom whichlora.page.questions import answer; answer");
  // collected when all is said, not while somebody waits
  const collect = python.runPython("import gc; gc.disable(); gc.collect");
  return { answer, collect, python };
}

try {
  const { answer, collect, python } = await start();
  postMessage({ ready: true });
  for (;;) {
    if (waiting === null) await new Promise((resume) => { wake = resume; });
    const { id, question, files } = waiting;
    waiting = null;
    try {
      await place(python, files);
    } catch (error) { // taken away or changed since it was chosen
      postMessage({ id, part: { part: "refusal", text: `a file can't be read (${error.message}); choose it again` } });
      postMessage({ id, done: true });
      continue;
    }
    const parts = answer(question);
    for (const part of parts) {
      postMessage({ id, part: JSON.parse(part) });
      await breath(); // a later question ends this one
      if (waiting !== null) break;
    }
    parts.destroy();
    if (waiting !== null) continue;
    collect();
    postMessage({ id, done: true });
  }
} catch (error) {
  postMessage({ fault: String(error && error.message ? error.message : error) });
}
