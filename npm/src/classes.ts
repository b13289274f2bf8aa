/** The engine's classes. They are those of its usual module until another one is used instead. */

import * as usual from "./tilewright.js";

type Classes = Pick<typeof usual, "Device" | "Engine" | "Header" | "Index" | "Loader" | "Pictures" | "PreparedPictures" | "Sha256">;

export type Device = usual.Device;
export type Engine = usual.Engine;
export type Header = usual.Header;
export type Index = usual.Index;
export type Loader<Loaded> = usual.Loader<Loaded>;
export type Pictures = usual.Pictures;
export type PreparedPictures = usual.PreparedPictures;
export type Sha256 = usual.Sha256;

// A transcriber's engine has only some of them.
export let { Device, Engine, Header, Index, Loader, Pictures, PreparedPictures, Sha256 }: Classes = usual;

/** Uses the classes of another module with the same ones, before any was used. */
export function useClasses(other: Classes): void {
  ({ Device, Engine, Header, Index, Loader, Pictures, PreparedPictures, Sha256 } = other);
}
