/* Browsers refuse workers on pages that are opened from a folder. There, the script of a worker runs in a hidden frame.
   The search is the one worker of the site. On pages from a server nothing changes. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      this.started = new Promise(start => {
        frame.onload = () => {  // Firefox replaces the document of a frame until then
          const { contentWindow: inside, contentDocument: page } = frame;
          inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data: structuredClone(data) }));
          const script = page.createElement("script");
          script.src = url;
          script.onload = () => start(inside);
          page.body.append(script);
        };
      });
      document.body.append(frame);
    }

    async postMessage(data) {
      const inside = await this.started;
      inside.dispatchEvent(new inside.MessageEvent("message", { data: inside.structuredClone(data) }));
    }
  };
}
