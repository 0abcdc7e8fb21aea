/** Pictures of the next message: chosen, dropped on the chat or pasted, and shown above the composer until they are sent. */

import { byId, element } from "./small.js";

let pictures = []; // data URLs

/** Show these above the composer. */
export function setPictures(urls) {
  pictures = urls;
  byId("pictures").hidden = !urls.length;
  byId("pictures").replaceChildren(...urls.map((url, i) => element("button", {
    type: "button", className: "quiet", ariaLabel: `Remove picture ${i + 1}`, title: "Remove",
    onclick: () => setPictures(pictures.toSpliced(i, 1)),
  }, picture(url))));
}

/** The pictures for the message that is sent now. */
export function takePictures() {
  const taken = pictures;
  setPictures([]);
  return taken;
}

/** A picture on the page. One of a stored chat is no longer there. */
export function picture(url) {
  if (url) return element("img", { src: url, alt: "A picture" });
  return element("span", { className: "soft", textContent: "A picture that is not stored" });
}

async function add(files) {
  for (const file of files) {
    const reader = new FileReader();
    const isRead = new Promise((resolve) => (reader.onloadend = resolve));
    reader.readAsDataURL(file);
    await isRead;
    if (reader.error) alert(`${file.name} cannot be read.`);
    else setPictures([...pictures, reader.result]);
  }
}

/** Take the pictures of a drop or a paste, if there are any. Where a text is pasted with its picture, the text counts. */
function take(event, { files, types }) {
  const images = [...files].filter(({ type }) => type.startsWith("image/"));
  if (!images.length || (event.type === "paste" && types.includes("text/plain"))) return;
  event.preventDefault();
  add(images);
}

byId("attach").onclick = () => byId("file").click();
byId("file").onchange = ({ target }) => {
  add([...target.files]);
  target.value = "";
};
byId("prompt").addEventListener("paste", (event) => take(event, event.clipboardData));
byId("chat").addEventListener("dragover", (event) => event.dataTransfer.types.includes("Files") && event.preventDefault());
byId("chat").addEventListener("drop", (event) => take(event, event.dataTransfer));
