// The package in Firefox.

import { missingFirefox, openFirefox } from "./firefox.mjs";
import { browserPlace, lane } from "./lane.mjs";

lane("Firefox", { missing: missingFirefox, open: browserPlace(openFirefox), devices: ["cpu", "gpu"] });
