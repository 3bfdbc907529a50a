// @ts-check
/** Photos as people bring them: files, folders and zip files. */

import { zipEntries } from "./zip.js";

/**
 * A photo that is read when it is needed: a thousand of them need not be in memory.
 * @typedef {{name: string, size: number, open: () => Promise<File>}} Source
 */

// Files that systems put into folders and zip files.
const HIDDEN = /(^|\/)(\.|__MACOSX\/|Thumbs\.db$|desktop\.ini$)/i;
const OTHER =
  /\.(txt|md|csv|tsv|jsonl?|xml|ya?ml|html?|pdf|docx?|xlsx?|pptx?|py|mp4|m4v|mov|avi|mkv|webm|mp3|m4a|wav|gz|tar)$/i;

/**
 * All dropped files, with those in folders. Call it in the event handler itself: the browser empties
 * the transfer afterwards.
 * @param {DataTransfer | null} transfer
 * @returns {Promise<File[]>}
 */
export async function droppedFiles(transfer) {
  const items = [...(transfer?.items ?? [])].filter((item) => item.kind === "file");
  const dropped = items.map((item) => ({ entry: item.webkitGetAsEntry(), file: item.getAsFile() }));
  /** @type {File[]} */
  const files = [];
  for (const { entry, file } of dropped) {
    if (entry?.isDirectory) files.push(...(await filesIn(entry)));
    else if (file) files.push(file);
  }
  return files;
}

/**
 * @param {FileSystemEntry} folder
 * @returns {Promise<File[]>}
 */
async function filesIn(folder) {
  const reader = /** @type {FileSystemDirectoryEntry} */ (folder).createReader();
  /** @type {FileSystemEntry[]} */
  const entries = [];
  for (;;) {
    // A browser lists about a hundred at a time.
    const some = await new Promise((resolve, reject) => reader.readEntries(resolve, reject));
    if (!some.length) break;
    entries.push(...some);
  }
  /** @type {File[]} */
  const files = [];
  for (const entry of entries) {
    if (entry.isDirectory) files.push(...(await filesIn(entry)));
    else files.push(await fileOf(/** @type {FileSystemFileEntry} */ (entry)));
  }
  return files.sort(byPath);
}

/**
 * @param {File} one
 * @param {File} other
 */
function byPath(one, other) {
  return one.webkitRelativePath.localeCompare(other.webkitRelativePath, "en", { numeric: true });
}

/**
 * @param {FileSystemFileEntry} entry
 * @returns {Promise<File>}
 */
async function fileOf(entry) {
  /** @type {File} */
  const file = await new Promise((resolve, reject) => entry.file(resolve, reject));
  // As for the files of a chosen folder.
  Object.defineProperty(file, "webkitRelativePath", { value: entry.fullPath.slice(1) });
  return file;
}

/**
 * Whether a file is known not to be an image, by its name.
 * @param {string} name
 */
export function isOtherFile(name) {
  return OTHER.test(name);
}

/**
 * The photos of files, those of folders by name, those in zip files one by one. As `engram predict` does, leave out hidden
 * files, and other files of folders and zip files.
 * @param {File[]} files
 * @returns {Promise<Source[]>}
 */
export async function sourcesOf(files) {
  const lists = await Promise.all([...files].sort(byPath).map(sourcesIn));
  return lists.flat().filter(({ name }) => !HIDDEN.test(name) && !(name.includes("/") && OTHER.test(name)));
}

/**
 * @param {File} file
 * @returns {Promise<Source[]>}
 */
async function sourcesIn(file) {
  const name = file.webkitRelativePath || file.name;
  if (!/\.zip$/i.test(name)) return [{ name, size: file.size, open: async () => file }];
  try {
    const entries = await zipEntries(file);
    return entries.map((entry) => ({ ...entry, name: `${name}/${entry.name}` }));
  } catch (error) {
    const open = () => Promise.reject(error);
    return [{ name, size: file.size, open }]; // listed with its reason
  }
}
