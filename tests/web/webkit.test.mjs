// The package in WebKit, which has no WebGPU on Linux.

import { browserPlace, lane } from "./lane.mjs";
import { missingWebKit, openWebKit } from "./webkit.mjs";

lane("WebKit", { missing: missingWebKit, open: browserPlace(openWebKit), devices: ["cpu"] });
