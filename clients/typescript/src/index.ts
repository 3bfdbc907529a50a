export * from "./client.js";
export { EngramError } from "./errors.js";
export type * from "./types.js";
