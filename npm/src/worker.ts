/** The worker of all but transcribers. */

import { textModule } from "./text-module.js";
import { handlers } from "./worker/handlers.js";
import { serve } from "./worker/serve.js";

void serve({
  handlers,
  what: "it",
  useTextModule: (url) => {
    textModule.url = url;
  },
});
