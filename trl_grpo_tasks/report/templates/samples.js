{# A click on a sample copies it into the dialog; arrow keys show its neighbours, Escape closes the dialog. A click on a
   folded thought only opens the thought. #}
const large=document.getElementById('large'),samples=[...document.querySelectorAll('.sample')];let at=0;
function show(i){at=(i+samples.length)%samples.length;const s=samples[at],pair=s.closest('.pair'),
head=pair?pair.querySelector('header').cloneNode(true):document.createElement('header');
large.querySelector('div').replaceChildren(head,...[...s.childNodes].map(n=>n.cloneNode(true)));
if(!large.open)large.showModal()}
samples.forEach((s,i)=>{s.addEventListener('click',e=>{if(!e.target.closest('summary'))show(i)});
s.addEventListener('keydown',e=>{if(e.key==='Enter'&&!e.target.closest('summary'))show(i)})});
large.addEventListener('click',e=>{if(e.target===large||e.target.tagName==='BUTTON')large.close()});
large.addEventListener('keydown',e=>{if(e.key==='ArrowRight')show(at+1);if(e.key==='ArrowLeft')show(at-1)});
