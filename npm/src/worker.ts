/** The worker of all but transcribers. */

import { textModule } from "./text-module.js";
import { cpuEngine, cpuFiles } from "./worker/cpu-engine.js";
import { handlers } from "./worker/handlers.js";
import { useCpuEngine } from "./worker/place.js";
import { serve } from "./worker/serve.js";

useCpuEngine(cpuEngine);
void serve({
  handlers,
  what: "it",
  useFiles: ({ textWasm, cpu, cpuWasm }) => {
    textModule.url = textWasm;
    [cpuFiles.script, cpuFiles.wasm] = [cpu, cpuWasm];
  },
});
