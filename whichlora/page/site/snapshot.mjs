// node snapshot.mjs FOLDER: write FOLDER/snapshot, the memory of Python after it has answered.
import { readFileSync, writeFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const folder = process.argv[2];
const { loadPyodide } = await import(pathToFileURL(`${folder}/pyodide.mjs`).href);
const python = await loadPyodide({ _makeSnapshot: true });
python.unpackArchive(new Uint8Array(readFileSync(`${folder}/whichlora.zip`)), "zip", { extractDir: "/whichlora" });
python.runPython(readFileSync(`${folder}/warm.py`, "utf8"));
writeFileSync(`${folder}/snapshot`, python.makeMemorySnapshot());
