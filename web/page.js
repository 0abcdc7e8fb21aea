/**
 * The page at `/`: a chat on the left, and on the right the engine at work.
 *
 * The chat is /v1/chat/completions (chat.js). The engine is /live, an event stream of snapshots (engine.js), and
 * /explain/<id>, which tells where the time of a request went (story.js). Paths are relative, so that the page works
 * under `--root-path`. What comes from the server is put in as text, never as markup.
 */

import { focusPrompt } from "./chat.js";
import { follow } from "./engine.js";
import { goOn } from "./history.js";
import { showModel } from "./welcome.js";

for (const close of document.querySelectorAll("dialog .close")) close.onclick = () => close.closest("dialog").close();
goOn();
focusPrompt();
showModel();
if (!document.hidden) follow();
