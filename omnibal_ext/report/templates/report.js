"use strict";
// Zoom and keys of the timelines. The drawings are whole without it: widths are percents of the drawing's own.
const NARROW = 9; // pixels that a microbatch's number needs
const MOST = 64;

for (const block of document.querySelectorAll(".timelines")) {
  const drawings = [...block.querySelectorAll("svg.timeline")];
  const detail = block.querySelector(".detail");
  let zoom = 1;

  function label() {
    for (const drawing of drawings) {
      const pixels = drawing.getBoundingClientRect().width / 100;
      for (const text of drawing.querySelectorAll("text.box")) {
        text.classList.toggle("narrow", text.dataset.width * pixels < NARROW);
      }
    }
  }

  function setZoom(factor) {
    const before = zoom;
    zoom = factor === 0 ? 1 : Math.min(MOST, Math.max(1, zoom * factor));
    for (const drawing of drawings) {
      const scroll = drawing.parentElement;
      const middle = scroll.scrollLeft + scroll.clientWidth / 2;
      drawing.style.width = `${zoom * 100}%`;
      scroll.scrollLeft = (middle * zoom) / before - scroll.clientWidth / 2;
    }
    label();
  }

  function show(span) {
    detail.textContent = span.getAttribute("aria-label");
  }

  for (const button of block.querySelectorAll("[data-zoom]")) {
    button.addEventListener("click", () => setZoom(Number(button.dataset.zoom)));
  }

  for (const drawing of drawings) {
    const lanes = [...drawing.querySelectorAll(":scope > g")].map((lane) => [...lane.querySelectorAll("g.span")]);
    const scroll = drawing.parentElement;
    let at = null;

    function go(lane, number) {
      const row = lanes[lane];
      if (!row || !row.length) return;
      at = [lane, Math.min(row.length - 1, Math.max(0, number))];
      row[at[1]].focus({ preventScroll: true });
      row[at[1]].scrollIntoView({ block: "nearest", inline: "nearest" });
      show(row[at[1]]);
    }

    drawing.addEventListener("pointerover", (event) => {
      const span = event.target.closest("g.span");
      if (span) show(span);
    });
    scroll.addEventListener("wheel", (event) => {
      if (!event.ctrlKey) return;
      event.preventDefault();
      setZoom(event.deltaY < 0 ? 1.25 : 0.8);
    }, { passive: false });
    scroll.addEventListener("keydown", (event) => {
      const [lane, number] = at ?? [0, -1];
      const moves = { ArrowRight: [lane, number + 1], ArrowLeft: [lane, number - 1], ArrowDown: [lane + 1, number],
        ArrowUp: [lane - 1, number], Home: [lane, 0], End: [lane, Infinity] };
      if (event.key === "+" || event.key === "=") setZoom(2);
      else if (event.key === "-") setZoom(0.5);
      else if (event.key === "0") setZoom(0);
      else if (event.key in moves) go(...moves[event.key]);
      else return;
      event.preventDefault();
    });
  }
  label();
  window.addEventListener("resize", label);
}
