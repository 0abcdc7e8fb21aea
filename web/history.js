/** The list of chats that the browser has stored, new chats with their undo, and the export of a chat. */

import { currentChat, onChange, open, shownTurns } from "./chat.js";
import { byId, copyButton, download, element, firstWords, link } from "./small.js";
import { forgetChat, keep, recall, savedChats, saveChat } from "./storage.js";
import { asMarkdown } from "./turns.js";

const CURRENT = `manta-chat:${location.pathname}`; // the chat that this tab shows, which a reload finds again
const when = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short" });

let undo = null; // takes back the latest "New chat" or deletion

function titleOf(chat) {
  return firstWords(chat.turns[0]?.content ?? "", 60) || "Empty chat";
}

function offerUndo(act, words) {
  undo = act;
  byId("undo").hidden = !act;
  byId("undo").textContent = words ?? "Undo";
}

function list() {
  const chats = savedChats();
  const { id } = currentChat();
  if (recall("sessionStorage", CURRENT) !== id) keep("sessionStorage", CURRENT, id);
  byId("export").hidden = !currentChat().turns.length;
  byId("chats").hidden = !chats.length;
  byId("chats-summary").textContent = `Chats (${chats.length})`;
  byId("chats-list").replaceChildren(...chats.map((chat) => {
    const title = titleOf(chat);
    const time = element("span", { className: "soft", textContent: when.format(chat.changed) });
    const choose = element("button", { type: "button", className: "pick", onclick: () => show(chat.id) },
      element("span", { className: "name", textContent: title }), time);
    if (chat.id === id) choose.setAttribute("aria-current", "true");
    const remove = Object.assign(link("Delete", () => forget(chat)), { ariaLabel: `Delete “${title}”` });
    return element("li", {}, choose, remove);
  }));
}

function show(id) {
  offerUndo(null);
  const chat = savedChats().find((each) => each.id === id);
  if (chat && id !== currentChat().id) open(chat);
}

function forget(chat) {
  const isShown = chat.id === currentChat().id;
  if (isShown) open();
  forgetChat(chat.id);
  offerUndo(() => {
    saveChat(chat);
    if (isShown) open(chat);
  }, "Undo delete");
  list();
  byId("undo").focus();
}

byId("new-chat").onclick = () => {
  const before = currentChat();
  if (!before.turns.length) return open();
  open();
  offerUndo(() => open(before));
};
byId("undo").onclick = () => {
  const act = undo;
  offerUndo(null);
  act?.();
  list();
};

byId("copy-chat").replaceWith(copyButton(() => asMarkdown(shownTurns()), "Copy as Markdown"));
byId("export-markdown").onclick = () => download("chat.md", "text/markdown", asMarkdown(shownTurns()));
byId("export-json").onclick = () => {
  download("chat.json", "application/json", JSON.stringify(currentChat(), null, 2));
};

onChange(() => {
  if (currentChat().turns.length) offerUndo(null);
  list();
});
byId("chats").ontoggle = () => byId("chats").open && list();

/** Show the chat again that this tab showed before it was loaded anew. */
export function goOn() {
  const id = recall("sessionStorage", CURRENT);
  const chat = savedChats().find((each) => each.id === id);
  if (chat) open(chat);
  else list();
}
