{# Reloads the page of a running job, but never while a sample is enlarged or text is selected, and restores what the
   reader saw: open details, except thoughts, and the place relative to the nearest heading, since content above it may
   have grown. #}
const heads=[...document.querySelectorAll('h1,h2,main>details>summary')];
const details=[...document.querySelectorAll('main>details')];
const seen=JSON.parse(sessionStorage.getItem(location.pathname)||'null');history.scrollRestoration='manual';
if(seen){details.forEach((d,i)=>d.open=seen.open.includes(i));const head=heads.find(h=>h.textContent===seen.head);
if(head)scrollTo(0,scrollY+head.getBoundingClientRect().top-seen.top)}
addEventListener('pagehide',()=>{
const head=heads.filter(h=>h.getBoundingClientRect().top<innerHeight/2).pop()||heads[0];
sessionStorage.setItem(location.pathname,JSON.stringify({head:head.textContent,top:head.getBoundingClientRect().top,
open:details.flatMap((d,i)=>d.open?[i]:[])}))});
setInterval(()=>{if(!document.querySelector('dialog[open]')&&getSelection().isCollapsed)location.reload()},
60000)
