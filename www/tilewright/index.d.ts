// The types of the npm package, which `scripts/build-web` copies to `dist/tilewright/`, where the page imports it from.
export * from "../../npm/dist/index.js";
