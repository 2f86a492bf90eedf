// Run in a page under test; leaves its findings as JSON in an element of its own.
addEventListener('load', () => {
  const bad = window.pageErrors.map((message) => `script error: ${message}`);
  const all = (query, within = document) => [...within.querySelectorAll(query)];
  const check = (good, message) => { if (!good) bad.push(message); };

  const root = document.documentElement;
  check(root.scrollWidth <= innerWidth, `the page is ${root.scrollWidth} wide in a window of ${innerWidth}`);
  check(innerWidth === EXPECTED.width, `the window is ${innerWidth} wide, not ${EXPECTED.width}`);
  check(matchMedia('(prefers-color-scheme: dark)').matches === EXPECTED.dark, 'the other colour scheme');

  const inside = (a, b) => a.x >= b.x && a.y >= b.y && a.x + a.width <= b.x + b.width && a.y + a.height <= b.y + b.height;
  const drawing = document.querySelector('figure svg');
  for (const group of all('.box, .badge', drawing)) {
    const frame = group.querySelector('rect').getBBox();
    for (const text of all('text', group)) check(inside(text.getBBox(), frame), `text out of its box: ${text.textContent}`);
    check(inside(group.getBoundingClientRect(), drawing.getBoundingClientRect()), `box out of the drawing: ${group.textContent}`);
  }
  for (const badge of all('.badge', drawing)) {
    check(document.querySelector(badge.getAttribute('href')), `a cut that leads nowhere: ${badge.textContent}`);
    const mine = badge.getBoundingClientRect();
    for (const box of all('.box text', drawing)) {
      const other = box.getBoundingClientRect();
      const apart = mine.right <= other.left || other.right <= mine.left || mine.bottom <= other.top || other.bottom <= mine.top;
      check(apart, `cut ${badge.textContent} lies over a text`);
    }
  }

  const number = (text) => text.match(/[\d.]+/g).map(Number);
  const light = (color) => {
    const [r, g, b] = number(color).map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (a, b) => (Math.max(light(a), light(b)) + 0.05) / (Math.min(light(a), light(b)) + 0.05);
  const ground = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const { backgroundColor } = getComputedStyle(e);
      if ((number(backgroundColor)[3] ?? 1) === 1) return backgroundColor;
    }
    return 'rgb(255, 255, 255)';
  };
  for (const element of all('main *:not(svg *)')) {
    if (![...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim())) continue;
    const ratio = contrast(getComputedStyle(element).color, ground(element));
    check(ratio >= 4.5, `contrast ${ratio.toFixed(2)} of ${element.textContent.slice(0, 30)}`);
  }
  for (const text of all('figure svg text')) {
    const shape = text.parentElement.querySelector('circle, rect');
    const ratio = contrast(getComputedStyle(text).fill, getComputedStyle(shape).fill);
    check(ratio >= 4.5, `contrast ${ratio.toFixed(2)} of ${text.textContent.slice(0, 30)}`);
  }

  const table = document.querySelector('table.sortable');
  const rows = () => [...table.tBodies[0].rows];
  const before = new Set(rows());
  all('thead button', table).forEach((button, i) => {
    const head = button.parentElement;
    const keys = () => rows().map((row) => row.cells[i].dataset.sort ?? row.cells[i].textContent);
    const compare = (a, b) => (isNaN(a) || isNaN(b) ? a.localeCompare(b, 'en', { numeric: true }) : a - b);
    for (const [name, sign] of [['ascending', 1], ['descending', -1]]) {
      button.focus();
      check(document.activeElement === button, `heading ${i} cannot be focused`);
      button.click();
      check(head.getAttribute('aria-sort') === name, `heading ${i} is not said to be ${name}`);
      check(all('[aria-sort]:not([aria-sort=none])', table).length === 1, 'more than one column is said to be sorted');
      const found = keys();
      check(found.every((key, k) => k === 0 || sign * compare(found[k - 1], key) <= 0), `column ${i} is not ${name}`);
    }
  });
  check(rows().length === before.size && rows().every((row) => before.has(row)), 'rows were lost by sorting');
  for (const region of all('.scroll, pre')) {
    region.focus();
    check(document.activeElement === region, 'a region that scrolls cannot be reached by keyboard');
  }

  const result = document.createElement('pre');
  result.id = 'findings';
  result.textContent = JSON.stringify({ bad, boxes: all('.box', drawing).length, rows: before.size });
  parent.document.body.append(parent.document.adoptNode(result));
});
