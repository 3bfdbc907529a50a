// What programs here use of Node.
declare module "node:fs" {
  export function openAsBlob(path: string): Promise<Blob>;
  export function readFileSync(path: string): { toString(encoding: "base64"): string };
}
declare const process: { argv: string[] };
