// Browsers refuse workers to pages that are opened as files, and the search of the site runs in one. On such pages a
// hidden frame does the same work. On pages that a server delivers, this file changes nothing.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super()
      this.waiting = []
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.documentElement.append(this.frame)
      const inside = this.frame.contentWindow
      inside.postMessage = (data) => {
        const event = new MessageEvent("message", { data })
        this.dispatchEvent(event)
        if (this.onmessage) this.onmessage(event)
      }
      // Loads further scripts one after the other, as a worker does.
      inside.importScripts = (...addresses) =>
        addresses.reduce(
          (before, next) =>
            before.then(
              () =>
                new Promise((loaded, failed) => {
                  const script = inside.document.createElement("script")
                  script.src = next
                  script.onload = loaded
                  script.onerror = failed
                  inside.document.body.append(script)
                }),
            ),
          Promise.resolve(),
        )
      inside.importScripts(address).then(() => {
        const waiting = this.waiting
        this.waiting = null
        waiting.forEach((data) => this.postMessage(data))
      })
    }

    postMessage(data) {
      if (this.waiting) this.waiting.push(data)
      else this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }))
    }

    terminate() {
      this.frame.remove()
    }
  }
}
