for (const button of document.querySelectorAll('table.sortable thead button')) {
  button.addEventListener('click', () => {
    const head = button.parentElement;
    const body = head.closest('table').tBodies[0];
    const up = head.getAttribute('aria-sort') !== 'ascending';
    const key = (row) => {
      const cell = row.cells[head.cellIndex];
      return cell.dataset.sort === undefined ? cell.textContent : Number(cell.dataset.sort);
    };
    const order = (a, b) => (typeof a === 'number' ? a - b : a.localeCompare(b, 'en', { numeric: true }));
    const rows = [...body.rows].sort((a, b) => (up ? 1 : -1) * order(key(a), key(b)));
    for (const other of head.parentElement.cells) other.setAttribute('aria-sort', 'none');
    head.setAttribute('aria-sort', up ? 'ascending' : 'descending');
    body.append(...rows);
  });
}
